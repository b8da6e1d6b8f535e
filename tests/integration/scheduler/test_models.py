"""Models come and go: a real NATS, real schedulers, and hosts that obey over the wire."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.scheduler.models.controller import HostedJobKind
from services.scheduler.service import SchedulerService
from shared.messages import (
    GroupRecord,
    HostBeat,
    HostCommand,
    HostModel,
    HostRecord,
    HostReply,
    LoadModel,
    ModelDemand,
    ModelLease,
    ModelPlacement,
    ModelSpec,
    UnloadModel,
)
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.scheduler.cluster_fixture import FREE, House, Leader

GB = 1_000_000_000


class Host:
    """An executor that takes models, as the others see it: it answers, beats, and its groups serve."""

    def __init__(self, yard: "Yard", name: str, memory: int) -> None:
        self.name = name
        self.memory = memory
        self.told: list[LoadModel | UnloadModel] = []
        self.leaders: dict[str, Leader] = {}
        self.models: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.loads = asyncio.Event()
        self.loads.set()
        self._yard = yard

    async def start(self) -> None:
        await self._yard.bus.subscribe(subjects.host_control(self.name), HostCommand, self._on_command)  # type: ignore[arg-type]
        await self.beat()

    async def beat(self) -> None:
        used = sum(self._yard.sizes[model] for model in self.models.values())
        said = [HostModel(model, "failed", error=text, failed_at=time.time()) for model, text in self.failed.items()]
        beat = HostBeat(self.memory, used, 0, said, takes_models=True)
        await self._yard.hosts.put(self.name, HostRecord(self.name, beat, "ready"))

    async def record(self, group: str, model: str, state: Any) -> None:
        record = GroupRecord(group, model, state, 1, [], FREE, self.name, memory=self._yard.sizes[model])
        await self._yard.house.records.put(group, record)

    async def _on_command(self, command: LoadModel | UnloadModel) -> HostReply:
        async with self._yard.house.changed:
            self.told.append(command)
            self._yard.house.changed.notify_all()
        if isinstance(command, UnloadModel):
            return await self._unload(command)
        return await self._load(command)

    async def _load(self, command: LoadModel) -> HostReply:
        model, size = command.spec.name, self._yard.sizes[command.spec.name]
        if command.group in self.models:
            return HostReply(ok=True)
        used = sum(self._yard.sizes[other] for other in self.models.values())
        if used + size > self.memory:
            return HostReply(ok=False, code="model_does_not_fit", error="There is no room.", memory=size)
        if model in self.failed:
            await self.beat()
            return HostReply(ok=True)
        self.models[command.group] = model
        self._yard.tasks.append(asyncio.create_task(self._bring_up(command.group, model)))
        return HostReply(ok=True, memory=size)

    async def _bring_up(self, group: str, model: str) -> None:
        await self.record(group, model, "starting")
        await self.beat()
        await self.loads.wait()
        leader = self.leaders[group] = Leader(self._yard.bus, self._yard.house, group)
        await leader.subscribe()
        await self.record(group, model, "ready")

    async def _unload(self, command: UnloadModel) -> HostReply:
        if self.models.pop(command.group, None) is not None:
            await self.leaders.pop(command.group).stop()
            await self._yard.house.records.delete(command.group)
            await self.beat()
        return HostReply(ok=True)


class Yard:
    """Registry, hosts, and what is said of models."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.bus = house.bus
        self.sizes: dict[str, int] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self.registry = await Bucket.open(self.bus, subjects.REGISTRY_BUCKET, ModelSpec)
        self.hosts = await Bucket.open(self.bus, subjects.HOSTS_BUCKET, HostRecord)
        self.placements = await Bucket.open(self.bus, subjects.PLACEMENTS_BUCKET, ModelPlacement)
        self.leases = await Bucket.open(self.bus, subjects.LEASES_BUCKET, ModelLease)

    async def register(self, name: str, size: int = 50 * GB, **fields: Any) -> None:
        self.sizes[name] = size
        await self.registry.put(name, ModelSpec(name, f"org/{name}", **fields))

    async def host(self, name: str = "h1", memory: int = 80 * GB) -> Host:
        host = Host(self, name, memory)
        await host.start()
        return host

    async def until_said(self, model: str, holds: Callable[[ModelPlacement], bool]) -> ModelPlacement:
        async with asyncio.timeout(15):
            while True:
                entry = await self.placements.get(model)
                if entry is not None and holds(entry.value):
                    return entry.value
                await self.bus.flush()

    async def holder(self) -> str:
        entry = await self.leases.get("models")
        return entry.value.holder if entry is not None else ""


@pytest.fixture
async def yard(house: House) -> AsyncIterator[Yard]:
    yard = Yard(house)
    await yard.open()
    yield yard
    await asyncio.gather(*yard.tasks)


def figure(service: SchedulerService, name: str, **labels: str) -> float:
    return service.registry.get_sample_value(name, labels) or 0.0


async def test_a_request_waits_while_its_model_is_loaded(house: House, yard: Yard) -> None:
    host = await yard.host()
    host.loads.clear()
    await yard.register("a")
    async with house.scheduler() as service:
        await house.ask("r1", model="a")
        await house.until(lambda: bool(host.told))
        assert host.told == [LoadModel("h1/a", ModelSpec("a", "org/a"))]
        said = await yard.until_said("a", lambda said: bool(said.expected_at))
        assert (said.hosts, said.code) == (["h1"], "")
        await house.ask("r2", model="a")
        host.loads.set()
        await house.until(lambda: "h1/a" in host.leaders and len(host.leaders["h1/a"].requests) == 2)
        await house.until_settled()
        await yard.until_said("a", lambda said: not said.expected_at)
        await house.ask("r3", model="a")
        await house.until(lambda: len(host.leaders["h1/a"].requests) == 3)
        assert figure(service, "ryzanstein_models_loads_total", reason="demand") == 1
        assert figure(service, "ryzanstein_models_requests_total", what="cold") == 2
        assert figure(service, "ryzanstein_models_requests_total", what="hit") == 1
        assert figure(service, "ryzanstein_models_deciding") == 1
        assert len(host.told) == 1
    assert await yard.holder() == ""  # whoever leaves gives the lease back


@pytest.mark.parametrize("gone", SchedulerService.job_kinds, ids=lambda kind: kind.__name__)
async def test_without_a_kind_of_jobs_models_are_placed(
    house: House, yard: Yard, monkeypatch: pytest.MonkeyPatch, gone: HostedJobKind
) -> None:
    kinds = tuple(kind for kind in SchedulerService.job_kinds if kind is not gone)
    monkeypatch.setattr(SchedulerService, "job_kinds", kinds)
    host = await yard.host()
    await yard.register("a")
    async with house.scheduler() as service:
        await house.ask("r1", model="a")
        await house.until(lambda: "h1/a" in host.leaders and bool(host.leaders["h1/a"].requests))
        names = {metric.name for metric in service.registry.collect()}
        assert "ryzanstein_models_deciding" in names
        assert "ryzanstein_training_jobs" not in names


async def test_an_idle_model_makes_room_and_what_a_gateway_holds_counts(house: House, yard: Yard) -> None:
    host = await yard.host()
    await yard.register("a")
    await yard.register("b")
    async with house.scheduler():
        await house.ask("r1", model="a")
        await house.until(lambda: "h1/a" in host.leaders and bool(host.leaders["h1/a"].requests))

        async def hold() -> None:
            while True:  # as gateways do while they hold requests
                await yard.bus.publish(subjects.MODEL_DEMAND, ModelDemand("b", "gateway-1", 1))
                await asyncio.sleep(0.2)

        holding = asyncio.create_task(hold())
        await house.until(lambda: UnloadModel("h1/a", sleep=True) in host.told)
        await house.until(lambda: "h1/b" in host.models)
        holding.cancel()
        await yard.until_said("b", lambda said: said.hosts == ["h1"])


async def test_beside_a_pinned_model_requests_end_at_once_with_the_reason(house: House, yard: Yard) -> None:
    host = await yard.host()
    await yard.register("a", pinned=True, least=1)
    await yard.register("b")
    async with house.scheduler() as service:
        await house.until(lambda: "h1/a" in host.models)
        await yard.until_said("a", lambda said: not said.expected_at and bool(said.hosts))
        await house.ask("r1", model="b")
        await house.until(lambda: len(house.entries) == 1)
        (entry,) = house.entries
        assert (entry.error_code, entry.retryable) == ("model_does_not_fit", False)
        assert "on h1 a (50.0 GB) would have to go" in entry.error
        await house.ask("r2", model="b")
        await house.until(lambda: len(house.entries) == 2)
        assert figure(service, "ryzanstein_models_unplaced") == 1
        await yard.host("h2")
        await yard.until_said("b", lambda said: not said.code)
        await house.ask("r3", model="b")
        await yard.until_said("b", lambda said: said.hosts == ["h2"])
        await house.until_settled()


async def test_a_failed_load_is_told_and_a_removed_model_is_forgotten(house: House, yard: Yard) -> None:
    host = await yard.host()
    host.failed["a"] = "The file is damaged."
    await yard.register("a")
    async with house.scheduler():
        await house.ask("r1", model="a")
        await house.until(lambda: bool(house.entries))
        (entry,) = house.entries
        assert (entry.error_code, entry.retryable) == ("no_group_available", True)
        assert "h1: The file is damaged" in entry.error
        await yard.registry.delete("a")
        async with asyncio.timeout(15):
            while await yard.placements.get("a") is not None:
                await yard.bus.flush()


async def test_what_waits_for_a_model_that_was_removed_ends_and_for_one_that_is_back_does_not(
    house: House, yard: Yard
) -> None:
    """Among it may be what was answered long ago, and is delivered again since its acknowledgement was lost."""
    host = await yard.host()
    host.loads.clear()
    for name in ("a", "b"):
        await yard.register(name)
        await yard.registry.delete(name)
    async with house.scheduler() as service:
        await house.ask("r1", model="a")
        await house.ask("r2", model="a", attempt=1, lane="recovery")
        await house.until(lambda: len(house.entries) == 2)
        assert {(entry.error_code, entry.retryable) for entry in house.entries} == {("model_not_found", False)}
        await house.until_settled()
        await yard.register("b")
        models = service._models
        async with asyncio.timeout(15):
            while models.removed("b"):
                await yard.bus.flush()
        models._removed.add("b")  # as before the news of it
        await house.ask("r3", model="b")
        await house.until(lambda: bool(host.told))
        host.loads.set()
        await house.until(lambda: "h1/b" in host.leaders and bool(host.leaders["h1/b"].requests))
        assert len(house.entries) == 2


@pytest.mark.slow
async def test_another_takes_the_lease_of_one_that_has_died_and_repeats_harm_nobody(house: House, yard: Yard) -> None:
    host = await yard.host()
    host.loads.clear()
    await yard.register("a")
    await yard.register("b", 10 * GB)
    async with (
        house.scheduler(instance="s1", model_lease=0.8) as first,
        house.scheduler(instance="s2", model_lease=0.8) as second,
    ):
        await house.ask("r1", model="a")
        await house.until(lambda: bool(host.told))
        holder, other = (first, second) if await yard.holder() == "s1" else (second, first)
        assert other.instance != await yard.holder()
        await _die(holder)
        async with asyncio.timeout(15):
            while await yard.holder() != other.instance:
                await yard.bus.flush()
        await house.ask("r2", model="b")
        await house.until(lambda: "h1/b" in host.models)
        host.loads.set()
        await house.until(lambda: {"h1/a", "h1/b"} <= set(host.leaders))
        await house.until(lambda: all(leader.requests for leader in host.leaders.values()))
        assert sorted(command.group for command in host.told) == ["h1/a", "h1/b"]


async def test_a_scheduler_that_starts_leaves_alone_what_was_unloaded_and_asked_for_since(
    house: House, yard: Yard
) -> None:
    host = await yard.host()
    asked_at = time.time() - 1.0
    await yard.register("a", least=1, action="unload", action_at=asked_at)
    async with house.scheduler():
        await house.ask("r1", model="a")
        await house.until(lambda: "h1/a" in host.leaders and len(host.leaders["h1/a"].requests) == 1)
        await yard.until_said("a", lambda said: said.done_at == asked_at and not said.expected_at)
    async with house.scheduler():
        await yard.register("b", 10 * GB, least=1)
        await house.until(lambda: "h1/b" in host.models)
    assert [type(command) for command in host.told] == [LoadModel, LoadModel]


async def _die(service: SchedulerService) -> None:
    """Without a word: its connection breaks, and it does not come back."""
    client = service.bus.client
    client.options["allow_reconnect"] = False
    service._models._lease._held = None  # type: ignore[union-attr]  # it does not give it back
    await client.close()
    service.end()
