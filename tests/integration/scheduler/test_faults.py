"""Lost replies, repeated deliveries, stopped schedulers, faults of our own: no request is lost or run twice."""

import asyncio
from typing import Any

import pytest

from services.scheduler import intake, router
from tests.integration.scheduler.cluster_fixture import House


async def test_before_a_request_goes_elsewhere_the_silent_group_is_told_to_let_go_of_it(house: House) -> None:
    first, other = await house.leader("first"), await house.leader("other")
    for leader in (first, other):
        leader.lost_replies = 1
    async with house.scheduler(dispatch_timeout=0.2, suspect_time=0.2):
        await house.ask("a", attempt=2)
        await house.until(lambda: first.ids == other.ids == ["a"])
        # The second one was silent too: the request goes back to the first, and the second lets go.
        await house.until_settled()
        await house.until(lambda: len(first.withdrawn + other.withdrawn) == 2)
    assert first.withdrawn == other.withdrawn == [("a", 2)]
    assert first.cancelled == other.cancelled == []


async def test_a_delivery_that_is_repeated_is_settled_while_its_ring_lives(house: House) -> None:
    leaders = [await house.leader("one"), await house.leader("two")]
    async with house.scheduler() as service:
        await house.ask("a", attempt=1)
        await house.until(lambda: any(leader.ids for leader in leaders))
        await house.until_settled()
        home, other = leaders if leaders[0].ids else reversed(leaders)
        await house.ask("a", attempt=1)
        await house.ask("a", attempt=0)
        await house.until_settled()
        assert (home.batches, other.batches) == ([1], [])

        home.epoch = 2
        await home.record("starting")
        await house.until_known(service, home)
        await house.ask("a", attempt=1)
        await house.until(lambda: other.ids == ["a"])
        await house.until_settled()
    assert house.entries == []


async def test_a_scheduler_that_was_stopped_lets_go_of_what_others_have(house: House) -> None:
    waits = {"ack_wait": 0.5, "dispatch_timeout": 30}
    async with house.scheduler(**waits) as stopped:
        await house.ask("a")
        await house.until_lanes(stopped._metrics.received, {"interactive": 1})
        stopped._intake._stopping = True  # as a stopped process it neither pulls nor touches
        (delivery,) = stopped._intake._held.values()
        async with house.scheduler(**waits) as other:
            await house.until_lanes(other._metrics.received, {"interactive": 1})
            # Its time begins when it hears of the request, which is later than the broker's.
            while delivery.ours(asyncio.get_running_loop().time()):
                await house.bus.flush()
            leader = await house.leader()
            await house.until(lambda: leader.ids == ["a"])
            await house.until_settled()
            async with asyncio.timeout(10):
                while not stopped._metrics.lost._value.get():
                    await house.bus.flush()
    assert leader.batches == [1]


@pytest.mark.parametrize("where", ["claim", "request"])
async def test_a_fault_of_our_own_loses_no_request(house: House, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(router, "FAULT_PAUSE", 0.01)
    leaders = [await house.leader("g"), await house.leader("h")]  # with one there is nothing to claim
    async with house.scheduler(suspect_time=0.05) as service:
        assert service._router is not None
        owner: Any = service._router._pins if where == "claim" else service.bus
        works, faults = getattr(owner, where), [ValueError("a fault")]

        async def broken(*arguments: Any, **options: Any) -> Any:
            if faults:
                raise faults.pop()
            return await works(*arguments, **options)

        monkeypatch.setattr(owner, where, broken)
        await house.ask("a", session="s")
        await house.until(lambda: [leader.ids for leader in leaders if leader.ids] == [["a"]])
        await house.until_settled()
        for name in ("g", "h"):
            group = service._table.get(name)
            assert (group.sent_requests, group.sent_tokens) == (0, 0)
        assert not faults


async def test_a_model_that_nobody_serves_does_not_keep_others_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "FIRST_DEFERRAL", 0.1)
    leader, dead = await house.leader(), await house.leader("dead", state="gone")
    await dead.record("gone", "dead")
    async with house.scheduler(held_requests=8) as service:
        await house.ask_all(20, lane="batch", model="dead")
        await house.ask("a", lane="batch")
        await house.until(lambda: leader.ids == ["a"])
        assert service._metrics.deferred._value.get() >= 16
        assert await house.left() >= 20
        await dead.record("ready", "dead")
        await house.until(lambda: len(dead.requests) == 20)
        await house.until_settled()
    assert leader.ids == ["a"]
    assert house.entries == []


@pytest.mark.parametrize(("age", "touched"), [(29, 0), (31, 1), (46, 20), (61, 0)])
async def test_held_messages_are_touched_in_time_but_not_all_at_once(house: House, age: float, touched: int) -> None:
    """`ack_wait` is 60: due after 30 s, spread over 15 s, not ours after 60 s."""
    async with house.scheduler(ack_wait=60) as service:
        await house.ask_all(20)
        await house.until_lanes(service._metrics.received, {"interactive": 20})
        now = asyncio.get_running_loop().time()
        held = list(service._intake._held.values())
        for delivery in held:
            delivery.touched = now - age
        await service._intake._touch(now)
        assert sum(delivery.touched == now for delivery in held) == touched
        assert {delivery.ours(now) for delivery in held} == {age < 60}
