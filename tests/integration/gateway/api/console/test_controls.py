"""Every control of the chat, worked with mouse and keyboard in a real browser: what it does is seen in what is sent."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import Browser, Tab
from tests.integration.gateway.api.console.conftest import console
from tests.integration.gateway.api.console.test_chat import IDLE, LAST, Held, ask, finished
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, saying, stub_card, until

pytestmark = pytest.mark.slow
FIRST = "#transcript > li:first-child"
ANSWER = "#transcript > li:last-child"
OTHER = "org/other-model"
SHIFT = {"modifiers": 8}
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}


def of(field: str, what: str = "value") -> str:
    return f"document.getElementById('{field}').{what}"


def body(message: str) -> str:
    return f"document.querySelector('{message} .body').textContent.trim()"


async def fill(tab: Tab, field: str, text: str) -> None:
    """Types into a field that was clicked."""
    await tab.click(f"#{field}")
    await tab.run(f"{of(field, 'select')}()")
    await tab.type(text)


def asked(tab: Tab) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of the last chat completion that the page has asked for."""
    last = [one for one in tab.sent if one["url"].endswith("/v1/chat/completions")][-1]
    return json.loads(last["postData"]), {name.lower(): value for name, value in last["headers"].items()}


async def test_parameters_go_along_and_are_kept(tab: Tab, ring: FakeRing) -> None:
    await tab.click("#options > summary")
    given = {
        "system": "Be brief",
        "temperature": "0.5",
        "top-p": "0.25",
        "top-k": "20",
        "min-p": "0.05",
        "frequency-penalty": "-0.5",
        "presence-penalty": "1",
        "repetition-penalty": "1.1",
        "limit": "7",
        "seed": "42",
        "background": "5",
        "tools": '[{"name": "now"}]',
    }
    for field, text in given.items():
        await fill(tab, field, text)
    await fill(tab, "prompt", "Hi")
    await tab.click("#send")
    await finished(tab, 2)
    sent, headers = asked(tab)
    assert sent["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    wanted = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 20, "min_p": 0.05, "frequency_penalty": -0.5,
        "presence_penalty": 1, "repetition_penalty": 1.1, "max_tokens": 7, "seed": 42,
    }  # fmt: skip
    assert {name: sent[name] for name in wanted} == wanted
    assert "reasoning_effort" not in sent
    assert sent["tools"] == [{"type": "function", "function": {"name": "now"}}]
    assert headers["x-ryzanstein-background"] == "5"
    (request,) = ring.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.max_tokens) == (0.5, 0.25, 7)
    await tab.click("#new")
    await tab.until("document.querySelectorAll('#transcript > li').length === 0")
    assert {field: await tab.run(of(field)) for field in given} == given
    await tab.run(f"{of('effort', 'focus')}()")
    await tab.press("h", 72, "h")
    await ask(tab, "Think")
    await finished(tab, 2)
    assert asked(tab)[0]["reasoning_effort"] == "high"
    await tab.click("#preset-save")
    await tab.type("Brief")
    await tab.press("Enter", 13, "\r")
    await tab.until(f"{of('preset')} === 'Brief'")
    await fill(tab, "min-p", "0.5")
    assert await tab.run(of("preset")) == ""
    await tab.run(f"{of('preset', 'focus')}()")
    await tab.press("B", 66, "B")
    await tab.until(f"{of('min-p')} === '0.05' && {of('preset')} === 'Brief'")
    await tab.click("#preset-rename")
    await tab.type("Short")
    await tab.click("#naming-keep")
    await tab.until(f"{of('preset')} === 'Short'")
    await tab.run("window.confirm = () => true; undefined")
    await tab.click("#preset-delete")
    await tab.until(f"{of('preset')} === '' && {of('preset', 'options')}.length === 1")
    assert await tab.run(of("system")) == "Be brief", "what a conversation has stays"
    await fill(tab, "tools", "{")
    await ask(tab, "Not sent")
    await tab.until(f"{of('error', 'textContent')}.startsWith('The tools are not JSON')")
    assert await tab.run(of("prompt")) == "Not sent"
    assert len(ring.requests) == 2


async def test_lines_stop_and_the_keyboard(tab: Tab, ring: FakeRing) -> None:
    ring.behave = Held("Half", "rest")
    await tab.click("#prompt")
    await tab.type("one")
    await tab.press("Enter", 13, "\r", **SHIFT)
    await tab.type("two")
    await tab.click("#send")
    await tab.until(f"{body(ANSWER)} === 'Half'")
    assert await tab.run(body(FIRST)) == "one\ntwo"
    assert await tab.run(of("send", "hidden"))
    await tab.run(
        "const send = fetch, asked = new Promise(done => { window.answer = done });"
        "window.fetch = async (...given) => { if (given[1]?.method === 'DELETE') await asked; return send(...given) }"
    )
    await tab.click("#stop")
    await finished(tab, 2)
    assert await tab.run("document.activeElement.id") == "prompt", "before the gateway has answered"
    await tab.run("answer()")
    await until(lambda: len(ring.cancelled | ring.commanded) == 1)
    ring.behave = saying("New")

    async def edit_by_key() -> None:
        await tab.press("ArrowUp", 38)
        await tab.until(f"document.activeElement === document.querySelector('{FIRST} textarea')")
        await tab.run("document.activeElement.select()")
        await tab.type("other")

    await edit_by_key()
    await tab.press("Escape", 27)
    assert await tab.run(body(FIRST)) == "one\ntwo"
    await tab.click("#prompt")
    await edit_by_key()
    await tab.click(f"{FIRST} .foot button:not(.primary)")
    assert await tab.run(body(FIRST)) == "one\ntwo"
    assert len(ring.requests) == 1
    await tab.click(f"{FIRST} [data-action=edit]")
    await tab.until(f"document.activeElement === document.querySelector('{FIRST} textarea')")
    await tab.run("document.activeElement.select()")
    await tab.type("other")
    await tab.click(f"{FIRST} [data-action=save]")
    await tab.until(f"{IDLE} && {body(FIRST)} === 'other' && {body(ANSWER)} === 'New'")
    await tab.click(f"{FIRST} [data-action=previous]")
    await tab.until(f"{body(FIRST)} === 'one\\ntwo' && {body(ANSWER)} === 'Half'")
    await tab.click(f"{FIRST} [data-action=next]")
    await tab.until(f"{body(FIRST)} === 'other'")
    await tab.click(f"{ANSWER} [data-action=regenerate]")
    await tab.until(f"{IDLE} && {LAST}.querySelector('.versions span')?.textContent === '2 / 2'")
    ring.behave = saying("Cut off")
    await tab.click("#options > summary")
    await fill(tab, "limit", "3")
    await ask(tab, "Again")
    await tab.until(f"{IDLE} && {body(ANSWER)} === 'Cut'")
    await fill(tab, "limit", "20")
    await tab.click(f"{ANSWER} [data-action=continue]")
    await tab.until(f"{IDLE} && {body(ANSWER)} === 'CutCut off'")
    assert asked(tab)[0]["continue_final_message"] is True


async def test_text_code_and_answers_are_copied(tab: Tab, ring: FakeRing) -> None:
    code = "print('a')\n    print('b')"
    ring.behave = saying(f"Look:\n\n```python\n{code}\n```")
    await ask(tab, "Show me")
    await finished(tab, 2)

    await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    for selector, text in (
        (f"{ANSWER} .code button", code),
        (f"{ANSWER} .foot [data-action=copy]", f"Look:\n\n```python\n{code}\n```"),
        (f"{FIRST} [data-action=copy]", "Show me"),
    ):
        await tab.click(selector)
        await tab.until(f"document.querySelector('{selector}').textContent === 'Copied'")
        assert await tab.run("navigator.clipboard.readText()") == text
    await tab.run("navigator.clipboard.writeText = () => Promise.reject(new DOMException('x', 'NotAllowedError'))")
    await tab.click(f"{ANSWER} .code button")
    await tab.until(f"document.querySelector('{ANSWER} .code button').textContent === 'Copied'")
    assert await tab.run("navigator.clipboard.readText()") == code, "also where a policy forbids the usual way"


async def test_files_are_chosen_pasted_dropped_and_taken_away(tab: Tab, ring: FakeRing, tmp_path: Path) -> None:
    names = "[...document.querySelectorAll('#attached li')].map(one => one.firstChild.textContent)"
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    await asyncio.to_thread(one.write_text, "first")
    await asyncio.to_thread(two.write_text, "second")
    await tab.choose_files("#attach", one, two)
    await tab.until(f"{names}.length === 2")
    for kind, event, field in (
        ("pasted", "new ClipboardEvent('paste', {clipboardData: given", "prompt"),
        ("dropped", "new DragEvent('drop', {dataTransfer: given", "ask"),
    ):
        await tab.run(
            f"(() => {{ const given = new DataTransfer(); given.items.add(new File(['{kind}'], '{kind}.txt'));"
            f"document.getElementById('{field}').dispatchEvent({event}, bubbles: true, cancelable: true}})); }})()"
        )
        await tab.until(f"{names}.includes('{kind}.txt')")
    await tab.click('#attached [aria-label="Remove two.txt"]')
    await tab.until(f"{names}.length === 3")
    await tab.click("#send")
    await finished(tab, 2)
    (message,) = asked(tab)[0]["messages"]
    parts = [f"File {name}.txt:\n```\n{text}\n```" for name, text in (("one", "first"), ("pasted", "pasted"))]
    assert message["content"] == "\n\n".join([*parts, "File dropped.txt:\n```\ndropped\n```"])
    assert await tab.run(of("attached", "hidden"))
    await tab.click(f"{FIRST} .file summary")
    await tab.until(f"document.querySelector('{FIRST} .file').open")


async def test_another_model_is_asked_and_stays_chosen(tab: Tab, ring: FakeRing) -> None:
    await ring.add_model(stub_card(OTHER))
    await tab.until(f"[...{of('model', 'options')}].some(option => option.value === '{OTHER}')")
    await tab.run(f"{of('model', 'focus')}()")
    for key, code in (("Home", 36), ("End", 35)):
        if await tab.run(of("model")) != OTHER:
            await tab.press(key, code)
    assert await tab.run(of("model")) == OTHER
    await ask(tab, "Hi")
    await until(lambda: any(one["url"].endswith("/v1/chat/completions") for one in tab.sent))
    assert asked(tab)[0]["model"] == OTHER
    await tab.press("Escape", 27)
    await tab.run("window.before = true")
    await tab.call("Page.reload")
    await tab.until(f"!window.before && {of('model')} === '{OTHER}'")


async def test_menu_export_import_and_delete(tab: Tab, ring: FakeRing, tmp_path: Path) -> None:
    await tab.run(
        "window.confirm = () => true; window.saved = [];"
        "const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return make.call(URL, blob) };"
    )
    await ask(tab, "Keep this")
    await finished(tab, 2)
    summary = "#manage > summary"
    await tab.click(summary)
    await tab.click("#rename")
    assert await tab.run(of("naming-name")) == "Keep this"
    await tab.type("Nothing")
    await tab.press("Escape", 27)
    await tab.until(f"!{of('naming', 'open')} && document.activeElement.matches('{summary}')")
    await tab.click(summary)
    await tab.click("#rename")
    # The name is asked for again before the browser tells, with the next frame, that the dialog was closed.
    await tab.run(f"{of('naming-cancel', 'click()')}; {of('rename', 'click()')}")
    assert await tab.run(of("title", "textContent")) == "Keep this"
    await fill(tab, "naming-name", "Keep this, renamed")
    await tab.click("#naming-keep")
    await tab.until(f"{of('title', 'textContent')} === 'Keep this, renamed'")
    for count, control in enumerate(("export-markdown", "export-json"), 1):
        await tab.click(summary)
        await tab.click(f"#{control}")
        await tab.until(f"saved.length === {count}")
    await tab.click("#export-all")
    await tab.until("saved.length === 3")
    markdown, one, everything = await tab.run("saved")
    assert markdown.startswith("# Keep this, renamed\n\n## You\n\nKeep this")
    assert json.loads(one)["conversations"] == json.loads(everything)["conversations"]
    await tab.click(summary)
    await tab.click("#title")
    assert not await tab.run(of("manage", "open")), "a click elsewhere closes it"
    await tab.click(summary)
    await tab.click("#delete")
    links = "document.querySelectorAll('#conversations a').length"
    await tab.until(f"{links} === 0 && document.querySelectorAll('#transcript > li').length === 0")
    kept = tmp_path / "kept.json"
    await asyncio.to_thread(kept.write_text, one)
    await tab.choose_files("#import", kept)
    await tab.until(f"{links} === 1")
    assert await tab.run(of("import-note", "textContent")) == "kept.json: 1 conversation imported."
    await tab.choose_files("#import", kept)
    again = "kept.json: 0 conversations imported, 1 skipped since it is here already."
    await tab.until(f"{of('import-note', 'textContent')} === '{again}'")
    await tab.click("#conversations a")
    await finished(tab, 2)
    await fill(tab, "search", "nothing of the kind")
    await tab.until(f"{links} === 0")
    await fill(tab, "search", "keep")
    await tab.until(f"{links} === 1")


async def test_every_page_is_reached_by_mouse_and_by_keyboard(tab: Tab) -> None:
    await tab.press("Tab", 9)
    assert await tab.run("document.activeElement.className") == "skip"
    await tab.press("Enter", 13, "\r")
    await tab.until("document.activeElement.id === 'prompt'")
    for part in ("cluster", "models", "batches", "keys", "chat"):
        await tab.click(f"#to-{part}")
        await tab.until(f"!{of(part, 'hidden')}")
        assert await tab.run(of(f"to-{part}", "getAttribute('aria-current')")) == "page"
        assert await tab.run("document.querySelectorAll('main > section:not([hidden])').length") == 1
    await tab.run("window.before = true; location.hash = '#cluster'; location.reload()")
    await tab.until("!window.before && document.getElementById('conversations')?.textContent === 'none yet'")
    await tab.click("#side nav a[href=docs]")
    await tab.until("location.pathname === '/docs' && document.querySelectorAll('details').length > 20")
    await tab.click("#operations details > summary")
    await tab.until("document.querySelector('#operations details').open")


@pytest.fixture
async def phone(browser: Browser, gateway: RunningGateway) -> AsyncIterator[Tab]:
    async with console(browser, f"{gateway.url}/") as opened:
        await opened.call("Emulation.setDeviceMetricsOverride", **PHONE)
        await opened.until("innerWidth === 360")
        yield opened


async def test_the_chat_on_a_phone(phone: Tab, ring: FakeRing) -> None:
    tab = phone
    side = "getComputedStyle(document.getElementById('side')).visibility"
    lines = "".join(f"{number}\n\n" for number in range(60))
    held = ring.behave = Held(lines, "end")
    await tab.click("#prompt")
    await tab.type("Count")
    await tab.click("#send")
    await tab.until(f"{body(ANSWER)}.length > 100")
    await tab.run(f"{of('transcript', 'scrollTop')} = 0")
    await tab.click("#to-end")
    await tab.until(of("to-end", "hidden"))
    await tab.click("#stop")
    await finished(tab, 2)
    held.go.set()
    await tab.click("#options > summary")
    seen = of("ask", "getBoundingClientRect()")
    assert await tab.run(f"{seen}.top > 0 && {seen}.bottom <= innerHeight"), "the input is in sight"
    await fill(tab, "temperature", "0.5")
    await tab.click("#options > summary")
    await tab.click("#menu")
    await tab.until(f"{side} === 'visible' && document.activeElement.id === 'to-chat'")
    assert await tab.run(of("menu", "getAttribute('aria-expanded')")) == "true"
    for _ in range(30):
        await tab.press("Tab", 9)
        assert await tab.run("document.activeElement.closest('main') === null"), "what lies behind is not reached"
    await tab.press("Escape", 27)
    await tab.until(f"{side} === 'hidden' && document.activeElement.id === 'menu'")
    await tab.click("#menu")
    await tab.until(f"{side} === 'visible'")
    await tab.call("Input.dispatchMouseEvent", type="mousePressed", x=350, y=400, button="left", clickCount=1)
    await tab.call("Input.dispatchMouseEvent", type="mouseReleased", x=350, y=400, button="left", clickCount=1)
    await tab.until(f"{side} === 'hidden'")
    await tab.click("#menu")
    await tab.click("#new")
    await tab.until(f"{side} === 'hidden' && document.querySelectorAll('#transcript > li').length === 0")
    await tab.click("#menu")
    await tab.click("#new")
    await tab.until(f"{side} === 'hidden' && document.activeElement.id === 'prompt'")
    await tab.click("#menu")
    await tab.click("#conversations a")
    await finished(tab, 2)
    await tab.until(f"{side} === 'hidden'")
    await tab.click(f"{FIRST} [data-action=edit]")
    await tab.run("document.activeElement.select()")
    ring.behave = saying("Short")
    await tab.type("Less")
    await tab.click(f"{FIRST} [data-action=save]")
    await tab.until(f"{IDLE} && {body(ANSWER)} === 'Short'")
    assert asked(tab)[0]["temperature"] == 0.5
    assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
    await tab.click("#menu")
    await tab.until("document.querySelector('main').inert")
    await tab.call("Emulation.setDeviceMetricsOverride", **PHONE | {"width": 1200, "mobile": False})
    await tab.until("!document.querySelector('main').inert")


async def test_the_next_turn_is_prepared_while_it_is_typed(tab: Tab, ring: FakeRing) -> None:
    await ask(tab, "Hi")
    await finished(tab, 2)
    await ring.put_record("ready")
    await tab.until("[...document.querySelectorAll('#registry td')].some(cell => cell.textContent === 'loaded')")
    await tab.type("And ")
    await until(lambda: any(request.prefill for request in ring.requests))
    await tab.type("you?")
    [prepared] = [request for request in ring.requests if request.prefill]
    await tab.press("Enter", 13, "\r")
    await finished(tab, 4)
    said = ring.requests[-1]
    assert said.session == prepared.session
    assert said.prompt[: len(prepared.prompt)] == prepared.prompt
    assert len(prepared.prompt) >= len("Hi\nHello, world!\n")

    await tab.click("#options > summary")
    await tab.run(f"{of('ahead')} = 'off'; {of('ahead', 'dispatchEvent')}(new Event('input', {{bubbles: true}}))")
    await fill(tab, "prompt", "More")
    await tab.press("Enter", 13, "\r")
    await finished(tab, 6)
    assert sum(request.prefill for request in ring.requests) == 1
