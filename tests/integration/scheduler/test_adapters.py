"""Adapters that are declared before any host has their base: a real NATS, real schedulers, a host over the wire."""

import asyncio
from collections.abc import Callable

import pytest

from shared.config import CommonSettings
from shared.messages import HostBeat, HostCommand, HostModel, HostRecord, HostReply, ModelSpec, PullModel
from shared.messages.registry import AdapterRecord, PullAdapter, WantedAdapter
from shared.nats import subjects
from shared.nats.adapters import unregister, want
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.scheduler.cluster_fixture import scheduler

DIGEST = "ab" * 32


class Host:
    """Takes models, fetches what it is told to, and reads adapters of what it has."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.told: list[HostCommand] = []
        self.stored = False
        self.error = ""

    async def start(self) -> None:
        await self._bus.subscribe(subjects.host_control("h"), HostCommand, self._on_command)  # type: ignore[arg-type]
        await self.beat()

    async def beat(self) -> None:
        said = [HostModel("base", "stored")] if self.stored else []
        hosts = await Bucket.open(self._bus, subjects.HOSTS_BUCKET, HostRecord)
        await hosts.put("h", HostRecord("h", HostBeat(1 << 30, models=said, takes_models=True), "ready"))

    async def _on_command(self, command: HostCommand) -> HostReply:
        self.told.append(command)
        if isinstance(command, PullModel):
            self.stored = True
            await self.beat()
            return HostReply(ok=True)
        assert isinstance(command, PullAdapter)
        if not self.stored:
            return HostReply(ok=False, code="model_not_stored", error="It is not here.")
        if self.error:
            return HostReply(ok=False, code="model_load_error", error=self.error)
        found = AdapterRecord("x", "x", command.source, DIGEST, 8, 400, revision=command.revision)
        return HostReply(ok=True, adapter=found)


@pytest.fixture
async def host(bus: Bus) -> Host:
    made = Host(bus)
    await made.start()
    return made


@pytest.fixture
async def adapters(bus: Bus) -> Bucket[AdapterRecord]:
    registry = await Bucket.open(bus, subjects.REGISTRY_BUCKET, ModelSpec)
    await registry.put("base", ModelSpec("base", "org/base"))
    return await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)


async def until(bucket: Bucket[AdapterRecord], holds: Callable[[AdapterRecord], bool]) -> AdapterRecord:
    async with asyncio.timeout(30):
        async for update in bucket.watch():
            if update is not None and update[1] is not None and holds(update[1]):
                return update[1]
    raise AssertionError


async def test_a_declared_adapter_is_read_once_a_host_has_its_base(
    nats_settings: CommonSettings, host: Host, adapters: Bucket[AdapterRecord]
) -> None:
    wanted = WantedAdapter("base", "org/sql", "v1", 1.0)
    await want(adapters, "sql", wanted, "file")
    async with scheduler(nats_settings) as service:
        record = await until(adapters, lambda one: bool(one.digest))
        assert service.registry.get_sample_value("ryzanstein_models_adapters_wanted") is not None
    assert (record.name, record.model, record.source, record.revision) == ("sql", "base", "org/sql", "v1")
    assert (record.digest, record.origin, record.wanted) == (DIGEST, "file", None)
    base = ModelSpec("base", "org/base")
    pull = PullAdapter("sql", "base", "org/sql", base, "v1")
    assert host.told[:3] == [pull, PullModel(base), pull]


async def test_what_cannot_be_read_is_told_and_what_was_there_stays(
    nats_settings: CommonSettings, host: Host, adapters: Bucket[AdapterRecord]
) -> None:
    host.stored, host.error = True, "It has the rank 512."
    before = AdapterRecord("sql", "base", "org/old", "cd" * 32, 8, 400)
    await adapters.put("sql", before)
    await want(adapters, "sql", WantedAdapter("base", "org/new", since=1.0), "file")
    async with scheduler(nats_settings):
        record = await until(adapters, lambda one: one.wanted is not None and bool(one.wanted.error))
        assert (record.digest, record.source) == (before.digest, "org/old")
        assert record.wanted == WantedAdapter("base", "org/new", since=1.0, error="It has the rank 512.")
        host.error = ""
        await want(adapters, "sql", WantedAdapter("base", "org/new", since=2.0), "file")
        record = await until(adapters, lambda one: one.digest == DIGEST)
        assert [digest for digest, _ in record.retired] == [before.digest]
        await want(adapters, "other", WantedAdapter("nowhere", "org/x"), "file")
        assert (await unregister(adapters, "other")).wanted is None
