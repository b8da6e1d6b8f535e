"""What a scheduler ends by itself: deadlines, a full queue, cancelled generations."""

import asyncio
import time
from typing import Any

import pytest

from services.scheduler import rejections
from shared.errors import BrokerUnavailable
from shared.messages import CancelRequest, Refusal
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.scheduler.cluster_fixture import House


async def test_a_deadline_with_no_group_is_no_group_available(house: House) -> None:
    async with house.scheduler():
        await house.ask("a", deadline=time.time() + 0.1, attempt=3, generated=[1])
        await house.until(lambda: len(house.entries) == 1)
        await house.until_settled()
    (entry,) = house.entries
    assert (entry.generation_id, entry.attempt, entry.position, entry.tokens) == ("a", 3, 1, [])
    assert (entry.finish, entry.error_code, entry.retryable) == ("error", "no_group_available", True)
    assert "org/model v1" in entry.error


async def test_a_deadline_with_full_groups_is_deadline_exceeded(house: House) -> None:
    leader = await house.leader()
    leader.refuse = lambda request: Refusal(request.generation_id, "queue_full", "Full.")
    async with house.scheduler():
        await house.ask("a", deadline=time.time() + 0.2)
        await house.ask("past", deadline=1.0)
        await house.until(lambda: len(house.entries) == 2)
        await house.until_settled()
    assert {entry.error_code for entry in house.entries} == {"deadline_exceeded"}


async def test_more_waiting_than_the_bound_is_queue_full_but_recoveries_wait(house: House) -> None:
    async with house.scheduler(max_waiting=2, held_requests=2) as service:
        for index in range(4):
            await house.ask(f"i{index}")
            await house.ask(f"r{index}", lane="recovery")
        await house.until(lambda: len(house.entries) == 2)
        leader = await house.leader()
        await house.until(lambda: len(leader.requests) == 6)
        await house.until_settled()
        assert service._metrics.ended.labels("queue_full")._value.get() == 2
    assert {(e.generation_id, e.error_code, e.retryable) for e in house.entries} == {
        ("i2", "queue_full", True),
        ("i3", "queue_full", True),
    }
    assert sorted(leader.ids) == ["i0", "i1", "r0", "r1", "r2", "r3"]


async def test_the_bound_is_each_models_own(house: House) -> None:
    async with house.scheduler(max_waiting=2) as service:
        for index in range(3):
            await house.ask(f"dead{index}", model="dead")
        await house.ask("a")
        await house.until_lanes(service._metrics.received, {"interactive": 4})
        await house.until(lambda: bool(house.entries))
        leader = await house.leader()
        await house.until(lambda: leader.ids == ["a"])
    assert [(entry.generation_id, entry.error_code) for entry in house.entries] == [("dead2", "queue_full")]


def fail_first(patch: pytest.MonkeyPatch, owner: Any, beginning: str, *errors: Exception) -> list[Exception]:
    """Publications of `owner` to subjects that begin so fail with these; gives those that are still to come."""
    patch.setattr(rejections, "RETRY_PAUSE", 0.01)
    publish, left = owner.publish, [*errors]

    async def failing(subject: str, *arguments: Any, **options: Any) -> None:
        if subject.startswith(beginning) and left:
            raise left.pop()
        await publish(subject, *arguments, **options)

    patch.setattr(owner, "publish", failing)
    return left


async def test_what_the_broker_does_not_take_is_tried_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house.scheduler() as service:
        left = fail_first(monkeypatch, service.bus, "tokens.", *[BrokerUnavailable("Its buffer is full.")] * 3)
        await house.ask_all(4, deadline=1.0)
        await house.until(lambda: len(house.entries) == 4)
        await house.until_settled()
        assert not left
    assert sorted(entry.generation_id for entry in house.entries) == ["0", "1", "2", "3"]


async def test_an_acknowledgement_that_fails_is_tried_again_without_a_second_word(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.scheduler() as service:
        left = fail_first(monkeypatch, service.bus.client, "$JS.ACK", *[OSError("The socket is full.")] * 2)
        await house.ask("a", deadline=1.0)
        await house.until_settled()
        assert not left
    assert len(house.entries) == 1


async def test_a_consumer_that_cannot_be_told_does_not_stop_the_rest(house: House) -> None:
    async with house.scheduler():
        await house.ask("nobody", consumer="", deadline=1.0)
        await house.ask("a", deadline=1.0)
        await house.until(lambda: len(house.entries) == 1)
        await house.until_settled()
    assert house.entries[0].generation_id == "a"


async def test_a_waiting_generation_is_cancelled(house: House, bus: Bus) -> None:
    async with house.scheduler() as service:
        await house.ask("a", generated=[4, 5], attempt=1)
        await house.ask("b")
        await house.until_lanes(service._metrics.received, {"interactive": 2})
        await bus.publish(subjects.CANCEL, CancelRequest(["a", "unknown"]))
        await house.until(lambda: len(house.entries) == 1)
        leader = await house.leader()
        await house.until(lambda: leader.ids == ["b"])
        await house.until_settled()
    (entry,) = house.entries
    assert (entry.generation_id, entry.attempt, entry.position, entry.finish) == ("a", 1, 2, "cancelled")
    assert entry.error_code == ""


async def test_a_generation_cancelled_before_it_is_pulled_never_runs(house: House, bus: Bus) -> None:
    leader = await house.leader()
    async with house.scheduler():
        await bus.publish(subjects.CANCEL, CancelRequest(["a"]))
        await bus.flush()
        await house.ask("a")
        await house.ask("b")
        await house.until(lambda: leader.ids == ["b"] and len(house.entries) == 1)
        await house.until_settled()
    assert house.entries[0].finish == "cancelled"


async def test_a_dispatched_generation_is_cancelled_at_its_leader(house: House, bus: Bus) -> None:
    leader, other = await house.leader("g"), await house.leader("h", state="hung")
    async with house.scheduler():
        await house.ask("a")
        await house.until_settled()
        await bus.publish(subjects.CANCEL, CancelRequest(["a", "unknown"]))
        await house.until(lambda: leader.cancelled == ["a"])
    assert other.cancelled == []
    assert house.entries == []


@pytest.mark.parametrize("refused", [False, True], ids=["accepted", "refused"])
async def test_a_generation_cancelled_while_it_is_handed_over(house: House, bus: Bus, refused: bool) -> None:
    """It is cancelled at its leader, or else ends here."""
    leader = await house.leader()
    leader.hold = asyncio.Event()
    if refused:
        leader.refuse = lambda request: Refusal(request.generation_id, "queue_full", "Full.")
    async with house.scheduler(dispatch_timeout=30):
        await house.ask("a")
        await house.until(lambda: bool(leader.batches))
        await bus.publish(subjects.CANCEL, CancelRequest(["a"]))
        await bus.flush()
        leader.hold.set()
        await house.until(lambda: bool(house.entries) if refused else leader.cancelled == ["a"])
        await house.until_settled()
    assert [entry.finish for entry in house.entries] == (["cancelled"] if refused else [])
