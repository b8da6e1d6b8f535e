"""The console's chat in a real browser, at a gateway whose ring says what the test wants."""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.browser import Browser, Tab, find_chromium, run_browser
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="THE CONSOLE IS NOT TESTED: no chromium here; install it (Debian: chromium) or name one in "
        "RYZANSTEIN_TEST_CHROMIUM",
    ),
]
LAST = "document.querySelector('#transcript > li:last-child[data-role=assistant]')"
IDLE = "document.getElementById('stop').hidden"
ANSWER = r"""# An answer

Euler's identity is $e^{i\pi} + 1 = 0$, and a sum is

$$\sum_{k=1}^{n} k = \frac{n(n+1)}{2}$$

| language | year | typed |
|---|--:|:-:|
| Python | 1991 | *gradually* |
| Rust | 2015 | **yes** |

```python
def fibonacci(n: int) -> int:
    # the n-th number
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
```

1. a list with `code`
2. a [link](https://example.org/)

- [x] done
- [ ] not yet
"""
HOSTILE = """<script>window.hit = 1</script>
<img src=x onerror="window.hit = 2">
<svg onload="window.hit = 3"><a xlink:href="javascript:window.hit=4"><text>x</text></a></svg>
[click](javascript:window.hit=5) [data](data:text/html,<script>window.hit=6</script>)
![p](javascript:window.hit=7) <javascript:window.hit=8> [r](/v1/files)
```"onmouseover="window.hit=9
x
```
<iframe srcdoc="<script>parent.hit=10</script>"></iframe><style>*{display:none}</style>
$\\href{javascript:window.hit=11}{x}$
$\\includegraphics{http://127.0.0.1:9/x.png}$ $\\class{" onclick="window.hit=12}{y}$
<math><mtext><table><mglyph><style><img src=x onerror=window.hit=13></style></mglyph></table></mtext></math>
<form action="javascript:window.hit=14"><button>go</button></form>
"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    async with run_browser(CHROMIUM) as running:
        yield running


@pytest.fixture
async def tab(browser: Browser, gateway: RunningGateway) -> AsyncIterator[Tab]:
    """The console, which has found its gateway; nothing that it did may have gone wrong or outside."""
    async with browser.tab(f"{gateway.url}/") as opened:
        await opened.until(f"document.getElementById('model').value === '{MODEL}'")
        yield opened
        assert opened.errors == []
        outside = [url for url in opened.requests if not url.startswith((gateway.url, "blob:", "about:"))]
        assert outside == []


async def ask(tab: Tab, text: str) -> None:
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.press("Enter", 13, "\r")


async def finished(tab: Tab, count: int) -> None:
    """Waits until there are so many messages, the last of which is whole."""
    await tab.until(f"document.querySelectorAll('#transcript > li').length === {count} && {IDLE}")


SIZES = ((360, 740), (1024, 768), (1440, 900))
"""A phone, a tablet, a desk."""


async def picture(tab: Tab, path: Path) -> None:
    shown = await tab.call("Page.captureScreenshot", format="png")
    await asyncio.to_thread(path.write_bytes, base64.b64decode(shown["data"]))


async def test_markdown_at_three_sizes(tab: Tab, ring: FakeRing, tmp_path: Path) -> None:
    """The pictures are for people; they lie in RYZANSTEIN_TEST_SCREENSHOTS, where it is set."""
    ring.behave = saying(ANSWER)
    await ring.put_record("busy", running=3, waiting=2)
    await ask(tab, "Tell me something with maths, code and a table.")
    await finished(tab, 2)
    for tag in (
        "h1",
        "math",
        "table",
        "pre",
        "code",
        "li",
        "strong",
        "em",
        ".hljs-keyword",
        "[align=right]",
        "a[rel]",
    ):
        assert await tab.run(f"{LAST}.querySelector({json.dumps(tag)}) !== null"), tag
    assert await tab.run(f"{LAST}.querySelectorAll('math').length") == 2
    folder = Path(os.environ.get("RYZANSTEIN_TEST_SCREENSHOTS", tmp_path))
    for width, height in SIZES:
        mobile = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.until(f"innerWidth === {width}")
        for part in ("cluster", "models", "batches", "keys", "chat"):
            await tab.run(f"location.hash = '{part}'")
            await tab.until(f"!document.getElementById('{part}').hidden")
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), (part, width)
            if part != "chat":
                await picture(tab, folder / f"{part}-{width}.png")
        await tab.run("document.querySelector('#conversations a').click()")
        await finished(tab, 2)
        seen = "document.getElementById('ask').getBoundingClientRect()"
        assert await tab.run(f"{seen}.top > 0 && {seen}.bottom <= innerHeight"), "the input is in sight"
        await picture(tab, folder / f"chat-{width}.png")


async def test_hostile_text_does_nothing(tab: Tab, ring: FakeRing) -> None:
    ring.behave = saying(HOSTILE)
    await ask(tab, HOSTILE)
    await finished(tab, 2)
    body = f"{LAST}.querySelector('.body')"
    assert "window.hit = 1" in await tab.run(f"{body}.textContent"), "it is shown as text"
    for tag in (
        "script",
        "img",
        "svg",
        "iframe",
        "style",
        "form",
        "[onclick], [onload], [onerror], [onmouseover]",
    ):
        assert await tab.run(f"{body}.querySelectorAll('{tag}').length") == 0, tag
    links = await tab.run(f"[...{body}.querySelectorAll('a')].map(link => link.getAttribute('href'))")
    assert [link for link in links if not (link or "").startswith(("http:", "https:"))] == []
    await tab.run(f"{body}.querySelectorAll('*').forEach(one => one.click())")
    await tab.run("new Promise(resolve => setTimeout(resolve))")
    assert await tab.run("window.hit ?? null") is None


async def test_a_message_is_edited_answers_branch_and_are_generated_anew(tab: Tab, ring: FakeRing) -> None:
    await ask(tab, "one")
    await finished(tab, 2)
    await ask(tab, "two")
    await finished(tab, 4)
    await tab.run("document.querySelector('#transcript > li [data-action=edit]').click()")
    await tab.run("document.activeElement.select()")
    await tab.type("other")
    await tab.press("Enter", 13, "\r")
    await finished(tab, 2)
    first = "document.querySelector('#transcript > li')"
    version = ".querySelector('.versions span').textContent"
    assert await tab.run(f"{first}{version}") == "2 / 2"
    assert await tab.run(f"{first}.querySelector('.body').textContent") == "other"
    await tab.run(f"{first}.querySelector('[data-action=previous]').click()")
    await finished(tab, 4)
    assert await tab.run(f"{first}.querySelector('.body').textContent") == "one"
    ring.behave = saying("Something else")
    await tab.run(f"{LAST}.querySelector('[data-action=regenerate]').click()")
    await tab.until(f"{LAST}{version} === '2 / 2' && {IDLE}")
    assert (await tab.run(f"{LAST}.querySelector('.body').textContent")).strip() == "Something else"
    assert len(ring.requests) == 4
