"""A scheduler holds so many bytes of requests, and leaves the rest in the stream until there is room again."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from services.scheduler import intake as scheduler_intake
from services.scheduler.intake import RequestIntake
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.request import WaitingRequest
from services.scheduler.settings import SchedulerSettings
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from tests.integration.gateway.fake_ring import until

COUNT, SIZE = 12, 100_000


def large(number: int) -> bytes:
    """Of `SIZE` bytes and a little more."""
    return encode(GenerationRequest(f"g{number}", "r", "m", "c", [1], 8, session="s" * SIZE))


async def test_so_many_bytes_are_held(bus: Bus, nats_settings: CommonSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_intake, "FIRST_DEFERRAL", 0.05)
    monkeypatch.setattr(scheduler_intake, "LONGEST_DEFERRAL", 0.2)
    settings = SchedulerSettings(**dict(nats_settings), held_bytes=3 * SIZE + SIZE // 2)
    held: dict[str, WaitingRequest] = {}
    seen: set[str] = set()

    def admit(item: WaitingRequest, *, crowded: bool) -> bool:
        held[item.generation_id] = item
        seen.add(item.generation_id)
        assert sum(len(one.raw) for one in held.values()) <= settings.held_bytes
        return True

    metrics = SchedulerMetrics(CollectorRegistry())
    intake = RequestIntake(bus, settings, metrics, admit)
    for number in range(COUNT):
        await bus.jetstream().publish(subjects.intake_lane("interactive"), large(number))
    await intake.start()
    looking = asyncio.create_task(intake.look_after())
    await until(lambda: len(held) == 3)
    while len(seen) < COUNT:
        await until(lambda: bool(held), seconds=20)
        for name in list(held):
            await held.pop(name).delivery.ack()
    assert seen == {f"g{number}" for number in range(COUNT)}
    await intake.stop_pulling()
    await asyncio.wait_for(looking, 30)


async def test_an_inbox_is_left_after_so_many_pulls_and_no_request_with_it(
    bus: Bus, nats_settings: CommonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_intake, "RENEWAL", 2)
    seen: list[str] = []
    held: list[WaitingRequest] = []

    def admit(item: WaitingRequest, *, crowded: bool) -> bool:
        seen.append(item.generation_id)
        held.append(item)
        return True

    settings = SchedulerSettings(**dict(nats_settings), max_waiting=1)
    intake = RequestIntake(bus, settings, SchedulerMetrics(CollectorRegistry()), admit)
    pull = intake._pulls[0]
    monkeypatch.setattr(pull, "limit", 1)
    await intake.start()
    first = pull.inbox
    for number in range(COUNT):
        await bus.jetstream().publish(
            subjects.intake_lane(pull.lane), encode(GenerationRequest(f"g{number}", "r", "m", "c", [1], 8))
        )
        await until(lambda: bool(held), seconds=20)
        await held.pop().delivery.ack()
    assert seen == [f"g{number}" for number in range(COUNT)]
    assert pull.inbox != first
    assert pull.older is not None
    await intake.stop_pulling()
