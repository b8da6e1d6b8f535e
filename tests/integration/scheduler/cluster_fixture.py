"""The rest of the house, as a scheduler sees it: group leaders, a health monitor's records, a gateway."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.config import CommonSettings
from shared.messages import (
    Cancel,
    ControlCommand,
    ControlReply,
    DispatchBatch,
    DispatchReply,
    GenerationRequest,
    GroupEvent,
    GroupLoad,
    GroupRecord,
    GroupStatus,
    GroupTraits,
    Lane,
    Refusal,
    TokenEntry,
    TokenFrame,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.running import running

MODEL = "org/model v1"
CONSUMER = "gateway-1"
FREE = GroupLoad(free_blocks=100, total_blocks=100)


def scheduler(common: CommonSettings, **settings: Any) -> contextlib.AbstractAsyncContextManager[SchedulerService]:
    """A scheduler that has started; stopped at the end."""
    values = {"dispatch_timeout": 0.3, "suspect_time": 0.2, **common.model_dump(), **settings}
    return running(SchedulerService(SchedulerSettings(**values)))


class Leader:
    """A group leader: accepts everything unless told otherwise, and drops what it has already."""

    def __init__(self, bus: Bus, house: "House", name: str, epoch: int = 1) -> None:
        self.name = name
        self.epoch = epoch
        self.load = FREE
        self.traits: GroupTraits | None = None
        self.batches: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.withdrawn: list[tuple[str, int]] = []  # cancelled up to an attempt
        self.refuse: Callable[[GenerationRequest], Refusal | None] = lambda _request: None
        self.silent = False
        self.lost_replies = 0
        self.hold: asyncio.Event | None = None
        self._bus = bus
        self._house = house
        self._subscriptions: list[Any] = []

    async def start(self, state: GroupStatus = "ready") -> None:
        await self.subscribe()
        await self.record(state)

    async def subscribe(self) -> None:
        self._subscriptions = [
            await self._bus.subscribe(subjects.dispatch(self.name), DispatchBatch, self._on_batch),
            await self._bus.subscribe(subjects.control(self.name), ControlCommand, self._on_control),  # type: ignore[arg-type]
        ]

    async def stop(self) -> None:
        """Dies without a word."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []
        await self._bus.flush()

    async def record(self, state: GroupStatus, model: str = MODEL) -> None:
        record = GroupRecord(self.name, model, state, self.epoch, [], self.load, traits=self.traits)
        await self._house.records.put(self.name, record)

    @property
    def ids(self) -> list[str]:
        return [request.generation_id for request in self.requests]

    async def _on_batch(self, batch: DispatchBatch) -> DispatchReply | None:
        async with self._house.changed:
            self.batches.append(len(batch.requests))
            self._house.changed.notify_all()
        if self.hold is not None:
            await self.hold.wait()
        if self.silent:
            return None
        refused = [refusal for request in batch.requests if (refusal := self.refuse(request)) is not None]
        names = {refusal.generation_id for refusal in refused}
        accepted = [request for request in batch.requests if request.generation_id not in names]
        async with self._house.changed:
            known = {(request.generation_id, request.attempt) for request in self.requests}
            self.requests += [r for r in accepted if (r.generation_id, r.attempt) not in known]
            self._house.changed.notify_all()
        if self.lost_replies:
            self.lost_replies -= 1
            return None
        return DispatchReply(self.name, self.epoch, [request.generation_id for request in accepted], refused, self.load)

    async def _on_control(self, command: Cancel) -> ControlReply:
        async with self._house.changed:
            if command.attempt < 0:
                self.cancelled += command.generation_ids
            self.withdrawn += [(name, command.attempt) for name in command.generation_ids if command.attempt >= 0]
            self._house.changed.notify_all()
        return ControlReply(ok=True)


class House:
    """Everything around the scheduler, over one connection."""

    def __init__(self, bus: Bus, records: Bucket[GroupRecord]) -> None:
        self.bus = bus
        self.records = records
        self.entries: list[TokenEntry] = []
        self.changed = asyncio.Condition()

    @classmethod
    async def open(cls, bus: Bus) -> "House":
        house = cls(bus, await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord))
        await bus.subscribe(subjects.tokens(CONSUMER), TokenFrame, house._on_frame)
        return house

    def scheduler(self, **settings: Any) -> contextlib.AbstractAsyncContextManager[SchedulerService]:
        return scheduler(self.bus.settings, **settings)

    async def leader(self, name: str = "g", state: GroupStatus = "ready", epoch: int = 1) -> Leader:
        leader = Leader(self.bus, self, name, epoch)
        await leader.start(state)
        return leader

    async def ask(self, name: str, *, lane: Lane = "interactive", **fields: Any) -> GenerationRequest:
        """Hands a request in, as a gateway does."""
        request = GenerationRequest(
            generation_id=name,
            request_id=f"request-{name}",
            model=MODEL,
            consumer=CONSUMER,
            prompt=[1, 2, 3],
            max_tokens=5,
            lane=lane,
        )
        request = msgspec.structs.replace(request, **fields)
        await self.bus.publish_durable(subjects.intake(lane, request.model), request)
        return request

    async def ask_all(self, count: int, **fields: Any) -> None:
        """So many, named by their numbers."""
        for number in range(count):
            await self.ask(str(number), **fields)

    async def event(self, leader: Leader, kind: str) -> None:
        event = GroupEvent(leader.name, MODEL, leader.epoch, kind)  # type: ignore[arg-type]
        await self.bus.publish(subjects.HEALTH_EVENTS, event)

    async def until(self, holds: Callable[[], bool], seconds: float = 15.0) -> None:
        """Waits for something that leaders or the gateway see."""
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(holds)

    async def until_lanes(self, received: Any, counts: dict[str, int]) -> None:
        """Waits until a scheduler has received so many requests per lane."""
        async with asyncio.timeout(15):
            while any(received.labels(lane)._value.get() < count for lane, count in counts.items()):
                await self.bus.flush()

    async def until_known(self, service: SchedulerService, leader: Leader) -> None:
        """Waits until a scheduler has read of the leader's present life."""
        async with asyncio.timeout(15):
            while (group := service._table.get(leader.name)) is None or group.epoch != leader.epoch:
                await self.bus.flush()

    async def left(self) -> int:
        """Requests in the stream that are not settled yet."""
        info = await self.bus.jetstream().stream_info(subjects.INTAKE_STREAM)
        return info.state.messages

    async def until_settled(self) -> None:
        """Waits until the stream has no request any more."""
        async with asyncio.timeout(15):
            while await self.left():
                await self.bus.flush()

    async def _on_frame(self, frame: TokenFrame) -> None:
        async with self.changed:
            assert (frame.group, frame.epoch, frame.step) == ("", 0, 0)
            self.entries += frame.entries
            self.changed.notify_all()
