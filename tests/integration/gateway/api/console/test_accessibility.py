"""The console for those who hear it or use no mouse: names, contrast, the order of the keyboard."""

import json
from typing import Any

import pytest

from shared.messages import GenerationRequest
from tests.e2e.browser import Tab
from tests.integration.gateway.api.console.test_chat import ANSWER, ask, finished, give
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import FakeRing, say

pytestmark = pytest.mark.slow
PARTS = ("chat", "cluster", "models", "fine-tuning", "batches", "keys")
# Roles, as Chromium has them, that say nothing without a name.
NAMED = {
    "button", "link", "textbox", "searchbox", "combobox", "spinbutton", "checkbox", "listbox", "DisclosureTriangle",
    "meter", "progressIndicator", "img", "image", "log", "region", "navigation", "form", "dialog",
}  # fmt: skip
# Texts with less than WCAG's contrast of 4.5 (AA), and how much they have.
LOW = """[...document.querySelectorAll('body *')].flatMap(one => {
  const texts = [...one.childNodes].filter(node => node.nodeType === 3 && node.data.trim());
  const field = one.matches('input, select, textarea') && (one.value || one.placeholder);
  if (!texts.length && !field || one.closest('.unseen, :disabled, option, .skip') || !one.checkVisibility({
    visibilityProperty: true, opacityProperty: true})) return [];
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((value, index) => value * a + below[index] * (1 - a));
  const above = [];
  for (let at = one; at; at = at.parentElement) above.push(parts(getComputedStyle(at).backgroundColor));
  const ground = above.reverse().reduce((below, colour) => over(colour, below), [255, 255, 255]);
  const luminance = (colour) => colour.map(value => value / 255).map(value => value <= 0.04045 ? value / 12.92
    : ((value + 0.055) / 1.055) ** 2.4).reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const shown = field && !one.value ? getComputedStyle(one, '::placeholder') : getComputedStyle(one);
  const [light, dark] = [luminance(over(parts(shown.color), ground)), luminance(ground)].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  return ratio >= 4.5 ? [] : [[one.tagName, one.id, one.className, (texts[0]?.data ?? field).slice(0, 30), ratio]];
})"""


async def nameless(tab: Tab) -> list[Any]:
    """Controls, and what else needs one, that the accessibility tree has no name for."""
    nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    assert {"DisclosureTriangle", "link", "dialog"} & {node["role"]["value"] for node in shown}
    found = [
        node["backendDOMNodeId"]
        for node in shown
        if node["role"]["value"] in NAMED and not str(node.get("name", {}).get("value", "")).strip()
    ]
    described = [(await tab.call("DOM.describeNode", backendNodeId=one))["node"] for one in found]
    return [[node["nodeName"], *node.get("attributes", [])] for node in described]


async def fill_chat(tab: Tab, ring: FakeRing) -> None:
    """A conversation with all that a message can have."""

    async def call_then_answer(fake: FakeRing, request: GenerationRequest) -> None:
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        await say(fake, request, ANSWER if len(fake.requests) == 1 else call)

    ring.behave = call_then_answer
    await tab.run("document.getElementById('options').open = true")
    await give(tab, "files", "notes.txt", "from a file")
    await tab.until("document.getElementById('attached').textContent.includes('notes.txt')")
    await ask(tab, "First")
    await finished(tab, 2)
    tools = "document.getElementById('tools')"
    given = json.dumps([{"name": "now"}])
    await tab.run(f"{tools}.value = '{given}', {tools}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    await ask(tab, "Second")
    await finished(tab, 4)
    await give(tab, "files", "more.txt", "another")
    await tab.until("document.getElementById('attached').textContent.includes('more.txt')")


async def unfold_chat(tab: Tab) -> None:
    await tab.run("document.querySelector('#conversations a').click()")
    await finished(tab, 4)
    await tab.until("document.querySelector('.results button') !== null")
    await tab.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    await tab.run("document.querySelector('#transcript [data-action=edit]').click()")
    await tab.until("document.querySelector('#transcript .body textarea') !== null")


async def test_every_control_has_a_name_and_every_text_its_contrast(
    tab: Tab, ring: FakeRing, hosts: FakeHosts, gateway: RunningGateway
) -> None:
    await ring.put_record("busy", running=3, waiting=2)
    await hosts.register("cold")
    await fill_chat(tab, ring)
    found: list[tuple[str, str, Any]] = []
    theme = "document.getElementById('theme')"
    for scheme in ("light", "dark"):
        await tab.run(f"{theme}.value = '{scheme}', {theme}.dispatchEvent(new Event('change'))")
        await tab.until(f"getComputedStyle(document.documentElement).colorScheme === '{scheme}'")
        for part in reversed(PARTS):
            await tab.run(f"document.getElementById('to-{part}').click()")
            await tab.until(f"!document.getElementById('{part}').hidden")
            await tab.until("document.querySelectorAll('section:not([hidden]) table tbody:empty').length === 0")
            if part == "chat":
                await unfold_chat(tab)
            found += [(part, scheme, one) for one in [*await nameless(tab), *await tab.run(LOW)]]
        await tab.run("document.getElementById('rename').click()")
        found += [("rename", scheme, one) for one in [*await nameless(tab), *await tab.run(LOW)]]
        await tab.press("Escape", 27)
    await tab.call("Page.navigate", url=f"{gateway.url}/docs")
    await tab.until("document.querySelectorAll('#operations details').length > 20")
    await tab.run("document.querySelector('#operations details').open = true")
    found += [("docs", scheme, one) for one in [*await nameless(tab), *await tab.run(LOW)]]
    assert found == []


async def test_the_keyboard_reaches_everything_in_the_order_in_which_it_is_read(tab: Tab, ring: FakeRing) -> None:
    await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)  # Shift+Tab leaves the page below
    await ask(tab, "Hi")
    await finished(tab, 2)
    await tab.click("#to-cluster")
    await tab.run("document.querySelector('.skip').focus()")
    await tab.run("document.querySelector('#conversations a').click()")
    await finished(tab, 2)
    await tab.press("Tab", 9, modifiers=8)
    at = "document.activeElement"
    shown = (
        f"(() => {{ const box = {at}.getBoundingClientRect(), style = getComputedStyle({at});"
        "return box.width > 0 && (style.outlineStyle !== 'none' || style.outlineColor === 'auto'); })()"
    )
    order: list[str] = []
    while True:
        await tab.press("Tab", 9)
        name = await tab.run(f"{at}.id || {at}.dataset.action || {at}.hash || {at}.tagName")
        if name in ("BODY", *order[:1]):  # it begins again
            break
        assert name == "prompt" or await tab.run(shown), f"nobody sees that {name} has the focus"
        order.append(name)
        assert len(order) < 60, order
    conversation = next(name for name in order if name.startswith("#chat/"))
    assert order == [
        "#prompt", "theme", "to-chat", "to-cluster", "to-models", "to-fine-tuning", "to-batches", "to-keys", "A", "new",
        "search", conversation, "import", "export-all", "model", "SUMMARY", "transcript", "copy", "edit", "copy",
        "regenerate", "prompt", "attach", "send", "SUMMARY",
    ]  # fmt: skip
    await tab.run("document.querySelector('.skip').focus()")
    await tab.press("Enter", 13, "\r")
    await tab.until(f"{at}.id === 'prompt'")
    assert await tab.run("document.querySelectorAll('#transcript > li').length") == 2, "it leads to no other chat"
    await tab.click("#to-cluster")
    await tab.run("document.querySelector('.skip').focus()")
    await tab.press("Enter", 13, "\r")
    await tab.until(f"{at}.id === 'prompt'")
