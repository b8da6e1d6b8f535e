"""The operator's pages in a real browser: models that come and go, adapters, keys, charts."""

import json
from collections.abc import AsyncIterator

import openai
import pytest

from shared.keys import KeyLimits, NewKey
from shared.messages import HostCommand, HostModel, HostReply
from shared.messages.registry import AdapterRecord, PullAdapter, PullModel
from tests.e2e.browser import Browser, Tab
from tests.integration.gateway.api.console.conftest import console
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.batches.helpers import jsonl, line, ready, requests, submit, text_of
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence, until

pytestmark = pytest.mark.slow
HUB = "org/another-model"
ROWS = "[...document.querySelectorAll('#registry tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
ADAPTERS = ROWS.replace("registry", "adapters")


class Host:
    """Takes every command."""

    def __init__(self) -> None:
        self.commands: list[HostCommand] = []

    async def on_command(self, command: HostCommand) -> HostReply:
        self.commands.append(command)
        if isinstance(command, PullAdapter):
            record = AdapterRecord(command.name, command.model, command.source, "ab" * 32, 8, 4096)
            return HostReply(ok=True, adapter=record)
        return HostReply(ok=True)


@pytest.fixture
async def host(hosts: FakeHosts) -> Host:
    made = Host()
    await hosts.obey(made.on_command)
    return made


@pytest.fixture
async def page(browser: Browser, gateway: RunningGateway, host: Host) -> AsyncIterator[Tab]:
    async with console(browser, f"{gateway.url}/") as opened:
        await opened.click("#to-models")
        await opened.run("window.confirm = () => true; undefined")
        yield opened


async def test_batches_are_cancelled_and_their_files_saved(
    tab: Tab, client: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    await ready(ring)
    await tab.run(
        "window.confirm = () => true; window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return make.call(URL, blob) };"
    )
    rows = ROWS.replace("registry", "jobs")
    await tab.click("#to-batches")
    long = line("long", messages=[{"role": "user", "content": "x" * 4000}])
    done = (await submit(client, jsonl([line("fine"), long]))).id
    await tab.until(f"{rows}.some(row => row[0] === '{done}' && row[1] === 'completed')")
    await tab.click(f'[aria-label="Output {done}"]')
    await tab.until("saved.length === 1")
    await tab.click(f'[aria-label="Errors {done}"]')
    await tab.until("saved.length === 2")
    output, errors = [json.loads(text) for text in await tab.run("saved")]
    assert text_of(output) == "Hello, world!"
    assert errors["response"]["body"]["error"]["code"] == "context_length_exceeded"
    ring.behave = silence
    endless = (await submit(client, requests(1))).id
    await tab.until(f"{rows}.some(row => row[0] === '{endless}' && row[1] === 'in_progress')")
    await tab.click(f'[aria-label="Cancel {endless}"]')
    await tab.until(f"document.getElementById('batches-note').textContent === '{endless} is being cancelled.'")
    await tab.until(f"{rows}.some(row => row[0] === '{endless}' && row[1] === 'cancelled')")


async def write(tab: Tab, **fields: str) -> None:
    for name, value in fields.items():
        await tab.run(f"document.getElementById('{name.replace('_', '-')}').value = {json.dumps(value)}")


async def act(tab: Tab, name: str, model: str) -> None:
    button = f"document.querySelector('[data-action={name}][data-model={json.dumps(model)}]')"
    await tab.until(f"{button} !== null")
    await tab.run(f"{button}.click()")


async def test_models_are_added_loaded_pinned_unloaded_and_removed(
    page: Tab, hosts: FakeHosts, host: Host, ring: FakeRing
) -> None:
    await ring.put_record("ready")
    await write(page, add_source=HUB, add_name="another")
    await page.click("#add button[type=submit]")
    await page.until(f"{ROWS}.some(row => row[0] === 'another' && row[1] === 'unloaded')")
    own = f"{ROWS}.find(row => row[0] === '{MODEL}').at(-1)"
    assert "Unload" not in await page.run(own), "its executor decides"
    await hosts.place("another", hosts=["host-1"])
    await act(page, "turn", "another")
    await page.until("document.getElementById('models-note').textContent === 'Load another: begun.'")
    asked = await hosts.registry.get("another")
    assert (asked.value.action, asked.value.source) == ("load", HUB)
    await hosts.say(HostModel("another", "loading", done=30, total=40, load_seconds=100.0))
    await page.until(f"{ROWS}.some(row => row[1].startsWith('loading  75 %'))")
    await act(page, "pin", "another")
    await page.until("document.querySelector('[data-action=pin]').textContent === 'Unpin'")
    await act(page, "remove", "another")
    await page.until("document.getElementById('models-note').textContent.includes('pinned')")
    assert await page.run("document.getElementById('models-note').getAttribute('role')") == "alert"
    await act(page, "pin", "another")
    await page.until("document.querySelector('[data-action=pin]').textContent === 'Pin'")
    await hosts.say()
    await act(page, "remove", "another")
    await page.until(f"!{ROWS}.some(row => row[0] === 'another')")
    page.errors.clear()  # Chromium itself writes the refusal to its console


async def test_files_are_pulled_with_their_progress(page: Tab, hosts: FakeHosts, host: Host) -> None:
    await page.click("#pull")
    assert await page.run("document.activeElement.id") == "add-source", "it needs one"
    await page.type(HUB)
    await page.click("#pull")
    await until(lambda: any(isinstance(one, PullModel) for one in host.commands))
    await hosts.say(HostModel(HUB, "downloading", done=3 << 20, total=8 << 20))
    await page.until(f"{ROWS}.some(row => row[1].includes('38 % (3.0 MiB of 8.0 MiB)'))")
    await hosts.say(HostModel(HUB, "failed", error="The disk is full."))
    await page.until(f"{ROWS}.some(row => row[1].includes('failed The disk is full.'))")
    asked = len(host.commands)
    await act(page, "pull", HUB)
    await until(lambda: any(isinstance(one, PullModel) for one in host.commands[asked:]))


async def test_adapters_are_loaded_and_unloaded(page: Tab, host: Host) -> None:
    await page.until(f"document.getElementById('adapter-base').value === '{MODEL}'")
    await write(page, adapter_source="org/sql-lora", adapter_name="sql")
    await page.click("#add-adapter button[type=submit]")
    await page.until(f"{ADAPTERS}.some(row => row[0] === 'sql' && row[4] === '4.0 KiB')")
    options = "[...document.getElementById('model').options].map(option => option.value)"
    await page.until(f"{options}.includes('sql')")
    await act(page, "unload", "sql")
    await page.until(f"!{ADAPTERS}.some(row => row[0] === 'sql') && !{options}.includes('sql')")


async def test_a_key_is_asked_for_and_used(tab: Tab, keys: Keys) -> None:
    key = await keys.make("t")
    trouble = "document.getElementById('trouble').textContent"
    await tab.until(f"{trouble}.includes('Enter an API key under Keys.')")
    await write_key(tab, key)
    await tab.until(f"{trouble} === '' && document.getElementById('link').dataset.state === 'ready'")
    assert key.token not in await tab.run("JSON.stringify(localStorage)")
    tab.errors.clear()  # Chromium itself writes each refusal to its console


async def test_the_page_of_keys_shows_who_has_them_and_their_use(tab: Tab, keys: Keys, gateway: RunningGateway) -> None:
    rows = ROWS.replace("registry", "owners")
    note = "document.getElementById('keys-note')"
    more = "document.getElementById('more-keys')"
    await tab.click("#to-keys")
    await tab.until(f"{rows}[0]?.[0] === 'none: everybody is let in'")
    viewer = await keys.make("ops", name="<b>viewer</b>", view_keys=True, manage_models=True)
    limited = await keys.make("acme", limits=KeyLimits(requests_per_minute=60))
    await changes_to(gateway, bearer(limited), 200)
    await write_key(tab, limited)
    await tab.until(f"{note}.textContent.includes('--view-keys') && {note}.getAttribute('role') === 'alert'")
    assert await tab.run(rows) == [["not shown"]]
    await write_key(tab, viewer)
    await tab.until(f"{rows}.length === 2 && {note}.hidden")
    first, second = await tab.run(rows)
    assert first[:8] == [
        f"rz-{limited.identity}-***", "\u2013", "acme", "active", "generate", "0 of 60", "\u2013", "\u2013",
    ]  # fmt: skip
    assert second[:5] == [
        f"rz-{viewer.identity}-***", "<b>viewer</b>", "ops", "active", "generate, manage models, view keys",
    ]  # fmt: skip
    assert second[8].endswith(" ago")
    assert second[10] == "never"
    assert await tab.run("document.getElementById('keys-count').textContent") == "(2)"
    assert await tab.run(f"{more}.hidden")
    for number in range(50):
        await keys.make("many", name=str(number))
    await tab.until(f"{rows}.length === 50 && !{more}.hidden")
    await tab.click("#more-keys")
    await tab.until(f"{rows}.length === 52 && {more}.hidden")
    await keys.revoke(limited)
    await tab.until(f"{rows}.at(-1)[3] === 'active' && {rows}.at(-2)[3] === 'revoked'")
    tab.errors.clear()  # Chromium itself writes each refusal to its console


async def write_key(tab: Tab, key: NewKey) -> None:
    field = "document.getElementById('key')"
    await tab.run(f"{field}.value = '{key.token}', {field}.dispatchEvent(new Event('input'))")
