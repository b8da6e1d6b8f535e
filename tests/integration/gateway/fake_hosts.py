"""The scheduler that decides and the executors that obey it, as far as a gateway sees them: buckets alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shared.messages import (
    HostBeat,
    HostCommand,
    HostModel,
    HostRecord,
    HostReply,
    ModelDemand,
    ModelPlacement,
    ModelSpec,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket


class FakeHosts:
    """Writes what the test says, and remembers what gateways ask for."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.demands: list[ModelDemand] = []
        self.demanded = asyncio.Event()

    async def start(self) -> None:
        self.registry = await Bucket.open(self.bus, subjects.REGISTRY_BUCKET, ModelSpec)
        self.hosts = await Bucket.open(self.bus, subjects.HOSTS_BUCKET, HostRecord)
        self.placements = await Bucket.open(self.bus, subjects.PLACEMENTS_BUCKET, ModelPlacement)
        await self.bus.subscribe(subjects.MODEL_DEMAND, ModelDemand, self._on_demand)
        await self.bus.flush()

    async def register(self, name: str, **fields: Any) -> ModelSpec:
        spec = ModelSpec(name, fields.pop("source", "builtin"), **fields)
        await self.registry.put(name, spec)
        return spec

    async def say(self, *models: HostModel, instance: str = "host-1") -> None:
        """What a host's heartbeat tells of models."""
        beat = HostBeat(memory=100, models=list(models), takes_models=True)
        await self.hosts.put(instance, HostRecord(instance, beat, "ready"))

    async def obey(self, answer: Callable[[Any], Awaitable[HostReply | None]]) -> None:
        """There is a host that takes models, and answers what it is told."""
        await self.say()
        await self.bus.subscribe(subjects.host_control("host-1"), HostCommand, answer)  # type: ignore[arg-type]
        await self.bus.flush()

    async def place(self, model: str, **fields: Any) -> None:
        await self.placements.put(model, ModelPlacement(model, **fields))

    async def _on_demand(self, demand: ModelDemand) -> None:
        self.demands.append(demand)
        self.demanded.set()

    def waiting(self, model: str) -> int:
        """What was told last; -1: nothing."""
        return next((one.waiting for one in reversed(self.demands) if one.model == model), -1)
