"""The console's chat in a real browser, at a gateway whose ring says what the test wants."""

import asyncio
import base64
import json
import os
from pathlib import Path

import pytest

from shared.messages import GenerationRequest
from tests.e2e.browser import Browser, Tab
from tests.integration.gateway.api.console.conftest import PREFIX, Proxy, console
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, say, saying, until

pytestmark = pytest.mark.slow
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


async def ask(tab: Tab, text: str) -> None:
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.press("Enter", 13, "\r")


async def finished(tab: Tab, count: int) -> None:
    """Waits until there are so many messages, the last of which is whole."""
    await tab.until(f"document.querySelectorAll('#transcript > li').length === {count} && {IDLE}")


RESUMED = f"GET {PREFIX}/v1/generations/chatcmpl-"
SIZES = ((360, 740), (1024, 768), (1440, 900))  # a phone, a tablet, a desk


async def picture(tab: Tab, path: Path) -> None:
    shown = await tab.call("Page.captureScreenshot", format="png")
    await asyncio.to_thread(path.write_bytes, base64.b64decode(shown["data"]))


async def test_markdown_at_three_sizes(tab: Tab, ring: FakeRing, tmp_path: Path) -> None:
    """The pictures are for people; they lie in RYZANSTEIN_TEST_SCREENSHOTS, where it is set."""
    ring.behave = saying(ANSWER)
    await ring.put_record("busy", running=3, waiting=2)
    await ask(tab, "Tell me something with maths, code and a table.")
    await finished(tab, 2)
    for tag in ("h1", "math", "table", "pre", "code", "li", "strong", "em", ".hljs-keyword", "[align=right]", "a[rel]"):
        assert await tab.run(f"{LAST}.querySelector({json.dumps(tag)}) !== null"), tag
    assert await tab.run(f"{LAST}.querySelectorAll('math').length") == 2
    folder = Path(os.environ.get("RYZANSTEIN_TEST_SCREENSHOTS", tmp_path))
    for width, height in SIZES:
        mobile = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.until(f"innerWidth === {width}")
        drawer = "getComputedStyle(document.getElementById('side')).visibility"
        await tab.until(f"{drawer} === '{'hidden' if mobile else 'visible'}'")
        for part in ("cluster", "models", "fine-tuning", "batches", "keys", "chat"):
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
    for tag in ("script", "img", "svg", "iframe", "style", "form", "[onclick], [onload], [onerror], [onmouseover]"):
        assert await tab.run(f"{body}.querySelectorAll('{tag}').length") == 0, tag
    links = await tab.run(f"[...{body}.querySelectorAll('a')].map(link => link.getAttribute('href'))")
    assert [link for link in links if not (link or "").startswith(("http:", "https:"))] == []
    await tab.run(f"{body}.querySelectorAll('*').forEach(one => one.click())")
    await tab.run("new Promise(resolve => setTimeout(resolve))")
    assert await tab.run("window.hit ?? null") is None


NESTED = "\n".join(f"{'  ' * level}- level {level}" for level in range(400))
# What a model may write that is dear to show.
HEAVY = {
    "a line of 1 MiB": "x" * (1 << 20),
    "a table of 30,000 rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * 30_000,
    "a table of 20,000 columns": "|" + "a|" * 20_000 + "\n|" + "-|" * 20_000 + "\n|" + "1|" * 20_000,
    "fences that never end": "```js\n" * 25_000,
    "lists 400 deep": NESTED,
    "lists 1,000 deep": "- " * 1000 + "x",
    "quotes 10,000 deep": "> " * 10_000 + "x",
    "formulas without end": ("$$\n" + "\\hat{a}" * 280 + "\n$$\n\n") * 90,
    "open brackets": ("[" * 4900 + "\n\n") * 40,
    "open tags": "<div>\n\n" * 25_000,
    "unclosed HTML": "<script>" * 20_000,
}


async def test_texts_that_are_dear_to_show_leave_the_page_usable(tab: Tab) -> None:
    """Each is shown, whole, with as many elements as a page can bear; and the page takes what is typed."""
    answer = "document.querySelector('#transcript > li[data-role=assistant]:last-child .body')"
    for number, (name, text) in enumerate(HEAVY.items()):
        node = {"parent": None, "id": "a", "role": "assistant", "at": 1, "text": text}
        made = {"id": f"c{number}", "title": name, "created": 1, "updated": number, "leaf": "a", "settings": {}}
        file = {"format": "ryzanstein-conversations", "version": 1, "conversations": [made | {"nodes": {"a": node}}]}
        await give(tab, "import-file", "c.json", json.dumps(file))
        await tab.until(f"document.querySelector('#conversations a[href=\"#chat/c{number}\"]') !== null")
        await tab.run(f"location.hash = '#chat/c{number}'")
        await tab.until(f"document.getElementById('title').textContent === {json.dumps(name)} && {answer} !== null")
        assert await tab.run(f"{answer}.querySelectorAll('*').length") < 25_000, name
        visible = "".join(char for char in text if char.isalnum())
        if "formulas" not in name:  # MathML has its text twice
            shown = await tab.run(f"{answer}.textContent.replace(/[^a-z0-9]/gi, '')")
            assert len(shown) >= len(visible), name
        await tab.run("document.getElementById('prompt').focus()")
        await tab.type(f"{number};")
    typed = "".join(f"{number};" for number in range(len(HEAVY)))
    assert await tab.run("document.getElementById('prompt').value") == typed
    assert await tab.run("window.hit ?? null") is None


class Held:
    """Says the first half of a text, and the other when it is told to."""

    def __init__(self, first: str, rest: str) -> None:
        self.first, self.rest = first, rest
        self.go = asyncio.Event()

    async def __call__(self, ring: FakeRing, request: GenerationRequest) -> None:
        await ring.emit(request, 0, list(self.first.encode()))
        await self.go.wait()
        await ring.emit(request, len(self.first), list(self.rest.encode()))
        await ring.emit(request, len(self.first) + len(self.rest), [], finish="stop")


async def test_a_stream_that_is_cut_is_resumed_below_any_path(browser: Browser, proxy: Proxy, ring: FakeRing) -> None:
    held = ring.behave = Held("Once upon ", "a time")
    async with console(browser, proxy.url) as tab:
        await ask(tab, "A story")
        body = f"({LAST}?.querySelector('.body').textContent ?? '').trim()"
        await tab.until(f"{body} === 'Once upon'")
        proxy.cut("/v1/chat/completions")
        await until(lambda: any(line.startswith(RESUMED) for line in proxy.asked))
        held.go.set()
        await finished(tab, 2)
        assert await tab.run(body) == "Once upon a time"
        assert len(ring.requests) == 1
        assert [error for error in tab.errors if '"source": "network"' not in error] == []
        tab.errors.clear()  # Chromium itself tells of the connection that was cut


async def test_the_view_follows_the_answer_unless_the_reader_has_scrolled_up(tab: Tab, ring: FakeRing) -> None:
    lines = "".join(f"{number}\n\n" for number in range(100))
    held = ring.behave = Held(lines, lines)
    await ask(tab, "Count")
    box = "document.getElementById('transcript')"
    at_end = f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight < 64"
    await tab.until(f"{box}.scrollHeight > 3 * {box}.clientHeight && {at_end}")
    await tab.run(f"{box}.scrollTop = 0")
    await tab.until("!document.getElementById('to-end').hidden")
    held.go.set()
    await finished(tab, 2)
    assert await tab.run(f"{box}.scrollTop") == 0
    await tab.run("document.getElementById('to-end').click()")
    await tab.until(at_end)
    assert await tab.run("document.getElementById('to-end').hidden")


async def test_conversations_are_found_renamed_written_imported_and_deleted(tab: Tab, ring: FakeRing) -> None:
    await tab.run("window.confirm = () => true; undefined")
    await ask(tab, "about lighthouses")
    await finished(tab, 2)
    await tab.run("document.getElementById('rename').click()")
    await tab.type("My <b>title</b>")
    await tab.press("Enter", 13, "\r")
    names = "[...document.querySelectorAll('#conversations a')].map(link => link.textContent)"
    await tab.until(f"{names}[0] === 'My <b>title</b>'")
    await search(tab, "nothing of the kind")
    await tab.until(f"{names}.length === 0")
    await search(tab, "LIGHTHOUSES")
    await tab.until(f"{names}.length === 1")
    await search(tab, "")
    node = {"parent": None, "text": "x <img src=x onerror=window.hit=1>", "at": 1, "role": "user"}
    answer = {
        "parent": "u", "role": "assistant", "at": 2, "text": "Done", "reasoning": "**Hm**", "model": "m",
        "calls": [{"id": "c", "name": "now", "arguments": "{}"}], "pace": {"rate": "x"}, "usage": 5,
    }  # fmt: skip
    kept = {"id": "c9", "title": "Imported", "created": 1, "updated": 2, "leaf": "a", "settings": {"system": "S"}}
    kept["nodes"] = {"u": {**node, "id": "u", "files": [{"name": "n.txt", "text": "T"}]}, "a": {**answer, "id": "a"}}
    file = {"format": "ryzanstein-conversations", "version": 1, "conversations": [kept]}
    await give(tab, "import-file", "c.json", json.dumps(file))
    await tab.until(f"{names}.includes('Imported')")
    await tab.run("[...document.querySelectorAll('#conversations a')].at(-1).click()")
    await finished(tab, 2)
    folded = "[...document.querySelectorAll('#transcript details:not([hidden]) summary')].map(one => one.textContent)"
    assert await tab.run(folded) == ["n.txt (1 B)", "Reasoning", "Tool call: now"]
    assert await tab.run("document.getElementById('system').value") == "S"
    assert await tab.run("document.querySelectorAll('#transcript details[open]').length") == 0
    await tab.run(
        "window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return make.call(URL, blob) };"
        "for (const id of ['export-markdown', 'export-json', 'export-all']) document.getElementById(id).click()"
    )
    await tab.until("window.saved.length === 3")
    markdown, one, everything = sorted(await tab.run("window.saved"), key=len)
    assert markdown.startswith("# Imported\n\n## System\n\nS\n\n## You\n\nFile n.txt:")
    assert [len(json.loads(text)["conversations"]) for text in (one, everything)] == [1, 2]
    await give(tab, "import-file", "bad.json", "{}")
    await tab.until("document.getElementById('import-note').textContent.includes('no conversations')")
    await tab.run("document.getElementById('delete').click()")
    await tab.until(f"{names}.length === 1 && document.querySelectorAll('#transcript > li').length === 0")
    assert await tab.run("window.hit ?? null") is None


async def search(tab: Tab, words: str) -> None:
    field = "document.getElementById('search')"
    await tab.run(f"{field}.value = {json.dumps(words)}, {field}.dispatchEvent(new Event('input'))")


async def give(tab: Tab, field: str, name: str, content: str) -> None:
    """A file into a file field, as if it had been chosen."""
    await tab.run(
        f"(() => {{ const given = new DataTransfer(); given.items.add(new File([{json.dumps(content)}], '{name}'));"
        f"const field = document.getElementById('{field}'); field.files = given.files;"
        "field.dispatchEvent(new Event('change')); })()"
    )


async def test_files_go_along_and_tools_are_called(tab: Tab, ring: FakeRing) -> None:
    await give(tab, "files", "photo.png", "a\0b")
    await tab.until("document.getElementById('error').textContent.includes('photo.png is not text')")
    await give(tab, "files", "notes.txt", "from a file")
    await tab.until("document.getElementById('attached').textContent.includes('notes.txt')")
    tools = "document.getElementById('tools')"
    given = json.dumps([{"name": "now"}])
    await tab.run(f"{tools}.value = '{given}', {tools}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    async def call_then_answer(fake: FakeRing, request: GenerationRequest) -> None:
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        await say(fake, request, call if len(fake.requests) == 1 else "It is noon")

    ring.behave = call_then_answer
    await ask(tab, "What time is it?")
    await finished(tab, 2)
    prompt = bytes(ring.requests[0].prompt).decode()
    assert "from a file" in prompt
    assert await tab.run(f"{LAST}.querySelector('.call summary').textContent") == "Tool call: now"
    await tab.run(f"{LAST}.querySelector('.results textarea').value = 'twelve'")
    await tab.run(f"{LAST}.querySelector('.results').requestSubmit()")
    await finished(tab, 4)
    assert "twelve" in bytes(ring.requests[1].prompt).decode()
    assert await tab.run(f"{LAST}.querySelector('.body').textContent.trim()") == "It is noon"


async def test_two_tabs_show_the_same_answer_and_keep_what_both_add(
    tab: Tab, browser: Browser, gateway: RunningGateway, ring: FakeRing
) -> None:
    held = ring.behave = Held("Half of it, ", "and the rest")
    await ask(tab, "In two tabs")
    body = f"({LAST}?.querySelector('.body').textContent ?? '').trim()"
    await tab.until(f"{body} === 'Half of it,'")
    address = await tab.run("location.href")
    async with console(browser, address, f"{gateway.url}/") as second:
        await second.until(f"{body} === 'Half of it,' && !{IDLE}")
        held.go.set()
        for each in (tab, second):
            await finished(each, 2)
            assert await each.run(body) == "Half of it, and the rest"
        assert len(ring.requests) == 1
        ring.behave = saying("More")
        await ask(second, "From the second")
        await finished(second, 4)
    await ask(tab, "From the first")
    await tab.until(f"{IDLE} && {body} === 'More'")
    counts = """new Promise((resolve) => {
      const opening = indexedDB.open('ryzanstein');
      opening.onsuccess = () => {
        const asked = opening.result.transaction('conversations').objectStore('conversations').getAll();
        asked.onsuccess = () => {
          opening.result.close();
          resolve(asked.result.map(one => Object.keys(one.nodes).length + 10 * Object.values(one.nodes).filter(
            node => node.pending).length));
        };
      };
    })"""
    await tab.until(f"{counts}.then(all => JSON.stringify(all) === '[6]')")


async def test_dark_where_the_reader_wants_it(tab: Tab, ring: FakeRing, tmp_path: Path) -> None:
    ring.behave = saying(ANSWER)
    await ask(tab, "In the dark")
    await finished(tab, 2)
    await tab.run("document.getElementById('options').open = true")
    light = await tab.run("getComputedStyle(document.body).backgroundColor")
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    await tab.until(f"getComputedStyle(document.body).backgroundColor !== '{light}'")
    await picture(tab, Path(os.environ.get("RYZANSTEIN_TEST_SCREENSHOTS", tmp_path)) / "chat-dark.png")
    field = "document.getElementById('theme')"
    await tab.run(f"{field}.focus()")
    await tab.press("L", 76, "L")
    await tab.until(f"getComputedStyle(document.body).backgroundColor === '{light}'")
    await tab.run("window.before = true; location.reload()")
    await tab.until(f"!window.before && document.body.dataset.begun && {field}.value === 'light'")
    assert await tab.run("getComputedStyle(document.body).backgroundColor") == light
    await tab.run(f"{field}.focus()")
    await tab.press("S", 83, "S")
    await tab.until(f"getComputedStyle(document.body).backgroundColor !== '{light}'")
    await finished(tab, 2)
    await tab.run("document.getElementById('manage').open = true")
    await tab.press("Escape", 27)
    assert not await tab.run("document.getElementById('manage').open")


async def test_an_answer_that_is_stopped_before_it_begins_is_cancelled(tab: Tab, ring: FakeRing) -> None:
    held = asyncio.Event()

    async def late(fake: FakeRing, request: GenerationRequest) -> None:
        await held.wait()
        await fake.emit(request, 0, list(b"Late"))

    ring.behave = late
    await ask(tab, "Never mind")
    await until(lambda: len(ring.requests) == 1)
    await tab.press("Escape", 27)
    await finished(tab, 2)
    held.set()
    await until(lambda: len(ring.cancelled | ring.commanded) == 1)
    assert await tab.run(f"{LAST}.querySelector('.body').textContent") == ""
