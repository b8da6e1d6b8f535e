"""`ryzanstein adapters` against a real NATS, with a host that says what the test says."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.commands.adapters import adapters_app
from shared.config import CommonSettings
from shared.errors import ConfigurationError, DeadlineExceeded, ModelLoadError, UnknownModel
from shared.messages import GroupLoad, GroupRecord, HostBeat, HostCommand, HostRecord, HostReply, ModelSpec
from shared.messages.registry import AdapterRecord, PullAdapter, WantedAdapter
from shared.nats import subjects
from shared.nats.adapters import settle
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.commands import Command


class Host:
    def __init__(self) -> None:
        self.asked: list[PullAdapter] = []
        self.error, self.code, self.base = "", "model_load_error", ""

    async def answer(self, command: HostCommand) -> HostReply:
        assert isinstance(command, PullAdapter)
        self.asked.append(command)
        if self.error:
            return HostReply(ok=False, code=self.code, error=self.error)
        digest = f"{len(self.asked):064x}"
        found = AdapterRecord(command.name, command.model, command.source, digest, 8, 3 << 20, base=self.base)
        return HostReply(ok=True, adapter=found)


@pytest.fixture
def command(nats_settings: CommonSettings) -> Command:
    return Command(adapters_app, nats_settings)


@pytest.fixture
async def host(bus: Bus) -> AsyncIterator[Host]:
    """Of the model `base`, which is registered."""
    registry = await Bucket.open(bus, subjects.REGISTRY_BUCKET, ModelSpec)
    await registry.put("base", ModelSpec("base", "org/base", aliases=["short"]))
    hosts = await Bucket.open(bus, subjects.HOSTS_BUCKET, HostRecord)
    await hosts.put("h", HostRecord("h", HostBeat(takes_models=True), "ready"))
    made = Host()
    subscription = await bus.subscribe(subjects.host_control("h"), HostCommand, made.answer)  # type: ignore[arg-type]
    await bus.flush()
    yield made
    await subscription.unsubscribe()


async def test_adapters_are_loaded_shown_replaced_and_unloaded(
    bus: Bus, host: Host, command: Command, tmp_path: Path
) -> None:
    assert "There are no adapters" in await command.run("list")
    assert "sql: adapter of base, rank 8" in await command.run("load", "sql", str(tmp_path))
    assert (host.asked[0].source, host.asked[0].spec.source) == (str(tmp_path), "org/base")
    groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
    held = GroupRecord("g", "base", "ready", 1, [], GroupLoad(), adapters=[f"{1:064x}"])
    await groups.put("g", held)
    (shown,) = await command.json("list", "--model", "short")
    assert (shown["name"], shown["groups"], shown["digest"]) == ("sql", ["g"], f"{1:064x}")
    assert "in memory of g" in await command.run("show", "sql")
    assert "3" in await command.run("list")
    with pytest.raises(ConfigurationError, match="replace it with --replace"):
        await command.run("load", "sql", "org/sql")
    await command.run("load", "sql", "org/sql", "--replace", "--model", "base")
    assert (await command.json("show", "sql"))["digest"] == f"{2:064x}"
    await command.run("unload", "sql")
    assert await command.json("list") == []
    names = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    entry = await names.get("sql")
    assert [digest for digest, _ in entry.value.retired] == [f"{1:064x}", f"{2:064x}"]


async def test_what_is_wrong_is_told(bus: Bus, host: Host, command: Command) -> None:
    registry = await Bucket.open(bus, subjects.REGISTRY_BUCKET, ModelSpec)
    for name in ("base", "short"):
        with pytest.raises(ConfigurationError, match="is taken by"):
            await command.run("load", name, "org/x")
    with pytest.raises(ConfigurationError, match="cannot be called"):
        await command.run("load", " x", "org/x")
    host.error = "It has rank 99."
    with pytest.raises(ModelLoadError, match="It has rank 99"):
        await command.run("load", "x", "org/x")
    host.error = ""
    await command.run("load", "tall", "org/tall")
    with pytest.raises(UnknownModel, match="tall may be meant"):
        await command.run("unload", "tal")
    with pytest.raises(UnknownModel, match="adapters list"):
        await command.run("show", "else")
    await registry.put("second", ModelSpec("second", "org/second"))
    with pytest.raises(ConfigurationError, match="There are 2 models here"):
        await command.run("load", "x", "org/x")


async def test_an_adapter_waits_for_a_host_that_has_its_base(bus: Bus, host: Host, command: Command) -> None:
    host.error, host.code = "It is not stored here.", "model_not_stored"
    said = await command.run("load", "sql", "org/sql", "--no-wait", "--revision", "v1")
    assert said == "sql: waits until a host has the files of its base base.\n"
    (listed,) = await command.json("list")
    assert (listed["digest"], listed["wanted"]["source"], listed["wanted"]["revision"]) == ("", "org/sql", "v1")
    assert "org/sql" in await command.run("list")
    with pytest.raises(DeadlineExceeded, match=r"sql could not be read within 0.2 s; it goes on. See `ryzan"):
        await command.run("load", "sql", "org/sql", "--timeout", "0.2")
    names = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    waiting = asyncio.create_task(command.run("load", "sql", "org/other", "--timeout", "30"))
    async with asyncio.timeout(30):
        async for update in names.watch():
            record = update[1] if update else None
            if record is not None and record.wanted is not None and record.wanted.source == "org/other":
                break
    found = AdapterRecord("sql", "base", "org/other", "ef" * 32, 4, 400)
    assert await settle(names, "sql", WantedAdapter("base", "org/sql"), found) is False, "it is another now"
    assert await settle(names, "sql", record.wanted, "It has no weights.")
    with pytest.raises(ModelLoadError, match=r"The adapter sql could not be read: It has no weights\."):
        await waiting
    assert await settle(names, "sql", record.wanted, found)
    host.error = ""
    await command.run("unload", "sql")
    await command.run("load", "sql", "org/sql")
    assert (await command.json("show", "sql"))["waits"] == ""


async def test_an_adapter_of_another_base_is_told(host: Host, command: Command) -> None:
    host.base = "meta-llama/Llama-3.1-8B"
    said = " ".join((await command.run("load", "sql", "org/sql")).split())
    assert "sql: its configuration says that it was trained for meta-llama/Llama-3.1-8B" in said
    host.base = "hub/Base"
    assert "trained for" not in await command.run("load", "other", "org/other")
