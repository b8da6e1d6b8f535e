"""The operator's pages in a real browser: models that come and go, adapters, keys, charts."""

import json
from collections.abc import AsyncIterator

import pytest

from shared.messages import HostCommand, HostModel, HostReply
from shared.messages.registry import AdapterRecord, PullAdapter, PullModel
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.e2e.browser import Browser, Tab
from tests.integration.gateway.api.console.conftest import console
from tests.integration.gateway.api_keys import Keys
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, until

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
async def host(bus: Bus, hosts: FakeHosts) -> Host:
    await hosts.say()
    made = Host()
    await bus.subscribe(subjects.host_control("host-1"), HostCommand, made.on_command)  # type: ignore[arg-type]
    await bus.flush()
    return made


@pytest.fixture
async def page(browser: Browser, gateway: RunningGateway, host: Host) -> AsyncIterator[Tab]:
    async with console(browser, f"{gateway.url}/") as opened:
        await opened.run("document.getElementById('to-models').click()")
        await opened.run("window.confirm = () => true; undefined")
        yield opened


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
    await page.run("document.getElementById('add').requestSubmit()")
    await page.until(f"{ROWS}.some(row => row[0] === 'another' && row[1] === 'unloaded')")
    own = f"{ROWS}.find(row => row[0] === '{MODEL}').at(-1)"
    assert "Unload" not in await page.run(own), "its executor decides"
    await hosts.place("another", hosts=["host-1"])
    await act(page, "turn", "another")
    await page.until("document.getElementById('models-note').textContent === 'Load another: begun.'")
    asked = await hosts.registry.get("another")
    assert asked is not None
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
    await write(page, add_source=HUB)
    await page.run("document.getElementById('pull').click()")
    await until(lambda: any(isinstance(one, PullModel) for one in host.commands))
    await hosts.say(HostModel(HUB, "downloading", done=3 << 20, total=8 << 20))
    await page.until(f"{ROWS}.some(row => row[1].includes('38 % (3.0 MiB of 8.0 MiB)'))")
    await hosts.say(HostModel(HUB, "failed", error="The disk is full."))
    await page.until(f"{ROWS}.some(row => row[1].includes('failed The disk is full.'))")


async def test_adapters_are_loaded_and_unloaded(page: Tab, host: Host) -> None:
    await page.until(f"document.getElementById('adapter-base').value === '{MODEL}'")
    await write(page, adapter_source="org/sql-lora", adapter_name="sql")
    await page.run("document.getElementById('add-adapter').requestSubmit()")
    await page.until(f"{ADAPTERS}.some(row => row[0] === 'sql' && row[4] === '4.0 KiB')")
    options = "[...document.getElementById('model').options].map(option => option.value)"
    await page.until(f"{options}.includes('sql')")
    await act(page, "unload", "sql")
    await page.until(f"!{ADAPTERS}.some(row => row[0] === 'sql') && !{options}.includes('sql')")


async def test_a_key_is_asked_for_and_used(tab: Tab, keys: Keys) -> None:
    key = await keys.make("t")
    trouble = "document.getElementById('trouble').textContent"
    await tab.until(f"{trouble}.includes('Enter an API key under Settings.')")
    field = "document.getElementById('key')"
    await tab.run(f"{field}.value = '{key.token}', {field}.dispatchEvent(new Event('input'))")
    await tab.until(f"{trouble} === '' && document.getElementById('link').dataset.state === 'ready'")
    assert key.token not in await tab.run("JSON.stringify(localStorage)")
    tab.errors.clear()  # Chromium itself writes each refusal to its console
