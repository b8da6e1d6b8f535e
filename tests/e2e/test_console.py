"""The console in a real browser, on a real stack with the stub engine."""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.browser import Browser, Tab, find_chromium, run_browser
from tests.e2e.stack import Stack

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="THE CONSOLE IS NOT TESTED: no chromium here; install it (Debian: chromium) or name one in "
        "RYZANSTEIN_TEST_CHROMIUM",
    ),
]
ANSWER = "document.querySelector('#transcript > li:last-child[data-role=assistant]')"
TEXT = f"({ANSWER}?.querySelector('.body').textContent ?? '').trim()"
FIGURES = f"({ANSWER}?.querySelector('.figures')?.textContent ?? '')"
IDLE = "document.getElementById('stop').hidden"
# What the browser keeps of conversations.
STORED = """new Promise((resolve) => {
  const opening = indexedDB.open('ryzanstein');
  opening.onsuccess = () => {
    const asked = opening.result.transaction('conversations').objectStore('conversations').getAll();
    asked.onsuccess = () => { opening.result.close(); resolve(asked.result); };
  };
})"""
# The id of the generation that is being read.
PENDING = f"{STORED}.then(all => all.flatMap(one => Object.values(one.nodes)).find(one => one.pending?.id)?.pending.id)"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--engine", "stub", "--no-smoke-test", "--replicas", "2")
    with Stack(tmp_path_factory.mktemp("console"), *options, RYZANSTEIN_STUB_STEP_MS="20") as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with run_browser(CHROMIUM) as running:
        yield running


@pytest.fixture
async def tab(browser: Browser, stack: Stack) -> AsyncIterator[Tab]:
    """The console, which has found its gateway; nothing that it did may have gone wrong or outside."""
    async with browser.tab(f"{stack.url}/") as opened:
        await opened.until("document.getElementById('model').value === 'stub'")
        yield opened
        assert opened.errors == []
        assert [url for url in opened.requests if not url.startswith(stack.url)] == []


async def set_limit(tab: Tab, limit: int) -> None:
    field = "document.getElementById('limit')"
    await tab.run(f"{field}.value = '{limit}', {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


async def ask(tab: Tab, text: str, limit: int) -> None:
    await set_limit(tab, limit)
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.press("Enter", 13, "\r")


async def test_a_chat_streams_and_is_kept(tab: Tab, stack: Stack) -> None:
    await ask(tab, "Hello there", 150)
    some = len(await tab.until(TEXT))
    await tab.until(f"{TEXT}.length > {some}")
    await tab.until(IDLE)
    shown = await tab.run(FIGURES)
    assert "150 tokens" in shown
    assert "tokens/s" in shown
    assert "first token" in shown
    await ask(tab, "And again", 5)
    await tab.until(f"document.querySelectorAll('#transcript > li').length === 4 && {IDLE}")
    await tab.run("document.getElementById('new').click()")
    await tab.until("document.querySelectorAll('#transcript > li').length === 0")
    await tab.until("document.querySelector('#conversations a')?.textContent === 'Hello there'")
    await tab.run("document.querySelector('#conversations a').click()")
    await tab.until("document.querySelectorAll('#transcript > li').length === 4")


async def test_stop_ends_the_generation_at_the_gateway_and_it_can_be_continued(tab: Tab, stack: Stack) -> None:
    await ask(tab, "On and on", 3000)
    await tab.until(TEXT)
    rows = "[...document.querySelectorAll('#generations tbody tr')].map(row => row.cells[2]?.textContent)"
    await tab.until(f"{rows}.includes('in_progress')")
    identity = await tab.until(PENDING)
    assert identity.startswith("chatcmpl-")
    await tab.press("Escape", 27)
    await tab.until(IDLE)
    assert (await tab.run(FIGURES)).endswith("stopped")
    before = await tab.run(TEXT)
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as http:
        end = time.monotonic() + 20
        while (await http.get(f"/v1/generations/{identity}")).json()["status"] != "cancelled":
            assert time.monotonic() < end, "it goes on"
        assert identity not in (await http.get("/v1/cluster")).text
    await set_limit(tab, 10)
    await tab.run(f"{ANSWER}.querySelector('[data-action=continue]').click()")
    await tab.until(f"{IDLE} && {FIGURES}.startsWith('10 tokens')")
    after = await tab.run(TEXT)
    assert after.startswith(before)
    assert len(after) > len(before)
    assert await tab.run("document.querySelectorAll('#transcript > li').length") == 2


async def test_a_reload_goes_on_where_it_was(tab: Tab, stack: Stack) -> None:
    await ask(tab, "A long story", 150)
    before = await tab.until(f"{TEXT}.length > 20 && {TEXT}")
    assert not await tab.run(IDLE)
    identity = await tab.until(PENDING)
    await tab.run("window.before = true")
    await tab.call("Page.reload")
    await tab.until(f"!window.before && {TEXT}.length > {len(before)} && {IDLE}")
    await assert_whole(tab, stack, identity, 150)
    assert "first token" not in await tab.run(FIGURES), "nobody has measured it"


async def test_an_answer_goes_on_when_its_gateway_is_killed(tab: Tab, stack: Stack) -> None:
    await ask(tab, "A longer story", 300)
    before = await tab.until(f"{TEXT}.length > 20 && {TEXT}")
    identity = await tab.until(PENDING)
    os.kill(stack.pid_of("services.gateway"), signal.SIGKILL)
    await tab.until(f"{TEXT}.length > {len(before)} && {IDLE}", 90)
    await assert_whole(tab, stack, identity, 300)
    assert await tab.run("document.querySelectorAll('#transcript > li').length") == 2
    await tab.until("document.getElementById('link').dataset.state === 'ready'")
    # Chromium itself writes each request that failed meanwhile to its console
    tab.errors[:] = [error for error in tab.errors if '"source": "network"' not in error]


async def assert_whole(tab: Tab, stack: Stack, identity: str, tokens: int) -> None:
    """What the page shows is what the gateway has, to the letter."""
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as http:
        whole = (await http.get(f"/v1/generations/{identity}")).json()
    assert whole["status"] == "completed"
    assert whole["response"]["usage"]["completion_tokens"] == tokens
    (text,) = await tab.run(
        f"{STORED}.then(all => all.flatMap(one => Object.values(one.nodes)).filter(one => one.role === 'assistant')"
        ".map(one => one.text))"
    )
    assert text == whole["response"]["choices"][0]["message"]["content"]
    assert (await tab.run(TEXT)).split() == text.split()


async def test_errors_are_shown_in_words(tab: Tab) -> None:
    await ask(tab, "Too much", 100_000)
    shown = await tab.until(f"{ANSWER}?.querySelector('.failure:not([hidden])')?.textContent")
    assert "maximum context length" in shown
    assert await tab.run(IDLE)
    # Chromium itself writes each refused request to its console
    assert len(tab.errors) == 1
    assert "status of 400" in tab.errors.pop()


async def test_rings_appear_and_a_killed_one_is_seen_to_change(tab: Tab, stack: Stack) -> None:
    states = "[...document.querySelectorAll('#rings [data-state]')].map(cell => cell.dataset.state)"
    await tab.until(f"{states}.length === 2 && {states}.every(state => state === 'ready')")
    assert await tab.run("document.querySelectorAll('#rings meter').length") == 2
    charts = "[...document.querySelectorAll('#charts svg')].map(chart => chart.getAttribute('aria-label'))"
    assert len(await tab.until(f"{charts}.every(Boolean) && {charts}")) == 4
    assert await tab.until("document.querySelectorAll('#charts polyline').length") >= 4
    services = "[...document.querySelectorAll('#services tbody tr')].map(row => row.cells[0]?.textContent)"
    assert {"gateway", "scheduler", "health-monitor", "executor"} <= set(await tab.run(services))
    stack.process.send_signal(signal.SIGSTOP)  # or it would be up again before anybody could see it gone
    try:
        os.kill(executor_of(stack), signal.SIGKILL)
        await tab.until(f"{states}.includes('gone')", 60)
    finally:
        stack.process.send_signal(signal.SIGCONT)
    await tab.until(f"{states}.every(state => state === 'ready')", 60)


def executor_of(stack: Stack) -> int:
    """One executor of two: its supervisor, with which the ring goes."""
    found = [
        process.pid
        for process in stack.descendants()
        if any(word.endswith("services.executor") for word in process.cmdline())
    ]
    return found[0]


async def test_the_api_s_description_works_offline(browser: Browser, stack: Stack) -> None:
    async with browser.tab(f"{stack.url}/docs") as tab:
        await tab.until("document.querySelectorAll('details').length > 20")
        assert "/v1/chat/completions" in await tab.run("document.body.textContent")
        assert "X-Session-ID" in await tab.run("document.body.textContent")
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith(stack.url)] == []


def test_pictures_are_small() -> None:
    for path in (Path(__file__).parents[2] / "docs").rglob("*.png"):
        assert path.stat().st_size < 200_000, path
