"""Sessions stay with the ring that has their cache, whichever scheduler places them."""

import asyncio
import contextlib

import pytest

from services.scheduler.placement import SessionPins
from services.scheduler.service import SchedulerService
from shared.messages import GroupLoad, SessionPin
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import pin_key
from tests.integration.scheduler.cluster_fixture import MODEL, House, Leader


def where(leaders: list[Leader], name: str) -> str:
    (found,) = [leader.name for leader in leaders if name in leader.ids]
    return found


async def report(house: House, service: SchedulerService, leader: Leader, load: GroupLoad) -> None:
    """Returns once the scheduler knows of the load."""
    leader.load = load
    await leader.record("busy")
    async with asyncio.timeout(10):
        while (group := service._table.get(leader.name)) is None or group.load != load:
            await house.bus.flush()


@pytest.fixture
async def pins(bus: Bus) -> Bucket[SessionPin]:
    return await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=60)


async def test_turns_of_a_session_land_on_one_group_with_two_schedulers(house: House) -> None:
    leaders = [await house.leader(f"g{index}") for index in range(4)]
    async with house.scheduler() as one, house.scheduler() as two:
        for turn in range(6):
            for session in range(10):
                await house.ask(f"{session}-{turn}", session=f"s{session}")
            await house.until(lambda turn=turn: sum(len(x.requests) for x in leaders) == 10 * (turn + 1))
        for session in range(10):
            homes = {where(leaders, f"{session}-{turn}") for turn in range(6)}
            assert len(homes) == 1
        assert len({where(leaders, f"{session}-0") for session in range(10)}) > 1
        received = [s._metrics.received.labels("interactive")._value.get() for s in (one, two)]
        assert sum(received) == 60
        assert min(received) > 0, "both schedulers work"
        hits = sum(s._metrics.pins.labels("hit")._value.get() for s in (one, two))
        assert hits >= 40


async def test_a_pin_is_written_for_all_and_moves_when_its_ring_is_gone(house: House, pins: Bucket[SessionPin]) -> None:
    home, other = await house.leader("a"), await house.leader("b")
    key = pin_key(MODEL, "s")
    async with house.scheduler():
        await house.ask("1", session="s")
        await house.until(lambda: bool(home.requests or other.requests))
        if other.requests:
            home, other = other, home
        entry = await pins.get(key)
        assert entry.value == SessionPin(home.name, 1)

        await house.event(home, "down")
        await home.record("gone")
        await house.bus.flush()
        await house.ask("2", session="s")
        await house.until(lambda: other.ids == ["2"])
        moved = await pins.get(key)
        assert moved.value == SessionPin(other.name, 1)

        home.epoch = 2
        await home.record("ready")
        await house.bus.flush()
        await house.ask("3", session="s")
        await house.until(lambda: other.ids == ["2", "3"])
        kept = await pins.get(key)
        assert kept.revision == moved.revision


async def test_with_one_group_nothing_is_pinned(house: House, pins: Bucket[SessionPin]) -> None:
    first = await house.leader("a")
    async with house.scheduler() as service:
        await house.ask("1", session="s")
        await house.until(lambda: first.ids == ["1"])
        await house.until_settled()
        assert await pins.get(pin_key(MODEL, "s")) is None

        second = await house.leader("b")
        await house.until_known(service, second)
        await house.ask("2", session="s")
        await house.until(lambda: len(first.ids + second.ids) == 2)
        entry = await pins.get(pin_key(MODEL, "s"))
        assert entry.value.group in ("a", "b")


async def test_a_ring_that_restarted_has_lost_its_sessions(house: House, pins: Bucket[SessionPin]) -> None:
    await pins.create(pin_key(MODEL, "s"), SessionPin("g", 1))
    leaders = [await house.leader("g", epoch=2), await house.leader("h", epoch=3)]
    async with house.scheduler():
        await house.ask("1", session="s")
        await house.until(lambda: any(leader.ids for leader in leaders))
    entry = await pins.get(pin_key(MODEL, "s"))
    assert [entry.value] == [SessionPin(leader.name, leader.epoch) for leader in leaders if leader.ids]


async def test_a_session_leaves_an_overloaded_home_once_and_takes_its_pin_along(
    house: House, pins: Bucket[SessionPin]
) -> None:
    await pins.create(pin_key(MODEL, "s"), SessionPin("home", 1))
    home, other = await house.leader("home"), await house.leader("other")
    home.load = GroupLoad(waiting=50, waiting_tokens=50_000, free_blocks=90, total_blocks=100)
    await home.record("busy")
    async with house.scheduler() as service:
        await house.ask("1", session="s")
        await house.until(lambda: other.ids == ["1"])
        moved = await pins.get(pin_key(MODEL, "s"))
        assert (moved.value.group, moved.value.epoch) == ("other", 1)
        assert moved.value.moved_at > 0
        # Now it is the other way round, and the session stays all the same: it has just moved.
        await report(house, service, home, GroupLoad(free_blocks=90, total_blocks=100, version=1))
        await report(house, service, other, GroupLoad(5, 0, 3000, 90, 100, version=1))
        await house.ask("2", session="s")
        await house.until(lambda: other.ids == ["1", "2"])
        # However busy that one becomes: single requests go elsewhere, and the pin stays.
        await report(house, service, other, GroupLoad(0, 50, 50_000, 90, 100, version=2))
        await house.ask("3", session="s")
        await house.until(lambda: home.ids == ["3"])
    entry = await pins.get(pin_key(MODEL, "s"))
    assert entry.revision == moved.revision


@pytest.mark.parametrize("schedulers", [2, 3])
async def test_all_turns_of_a_session_at_once_meet_on_one_group_whoever_places_them(
    house: House, schedulers: int
) -> None:
    leaders = [await house.leader(f"g{index}") for index in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        services = [await stack.enter_async_context(house.scheduler()) for _ in range(schedulers)]
        names = [(session, turn) for turn in range(5) for session in range(12)]
        await asyncio.gather(*(house.ask(f"{s}-{t}", session=f"s{s}") for s, t in names))
        await house.until(lambda: sum(len(leader.requests) for leader in leaders) == len(names))
        await house.until_settled()
        received = [s._metrics.received.labels("interactive")._value.get() for s in services]
    assert min(received) > 0, "all schedulers work"
    for session in range(12):
        assert len({where(leaders, f"{session}-{turn}") for turn in range(5)}) == 1


async def test_prompts_that_begin_alike_meet_on_one_group_without_a_session(house: House) -> None:
    leaders = [await house.leader(f"g{index}") for index in range(4)]
    async with house.scheduler(), house.scheduler(), house.scheduler():
        for number in range(36):  # one at a time: behind another prompt a home is not worth waiting for
            turn, prefix = divmod(number, 6)
            await house.ask(f"{prefix}-{turn}", prompt=[prefix] * 300 + [turn] * 5)
            await house.until(lambda number=number: sum(len(x.requests) for x in leaders) == number + 1)
            await house.until_settled()
    for prefix in range(6):
        assert len({where(leaders, f"{prefix}-{turn}") for turn in range(6)}) == 1
    assert len({where(leaders, f"{prefix}-0") for prefix in range(6)}) > 1


async def test_of_two_claims_one_wins_and_the_other_adopts(pins: Bucket[SessionPin]) -> None:
    one, two = SessionPins(pins, 60, 10), SessionPins(pins, 60, 10)
    wanted = [SessionPin("a", 1), SessionPin("b", 1)]
    results = await asyncio.gather(
        one.claim("k", wanted[0], lambda _pin: True, 0.0), two.claim("k", wanted[1], lambda _pin: True, 0.0)
    )
    assert results[0][0] == results[1][0]
    assert sorted(outcome for _, outcome in results) == ["adopted", "created"]
    assert one.cached("k", 1.0) == two.cached("k", 1.0) == results[0][0]

    new = [SessionPin("c", 1), SessionPin("d", 1)]
    results = await asyncio.gather(
        one.claim("k", new[0], lambda pin: pin in new, 1.0), two.claim("k", new[1], lambda pin: pin in new, 1.0)
    )
    assert results[0][0] == results[1][0]
    assert results[0][0] in new
    assert sorted(outcome for _, outcome in results) == ["adopted", "moved"]


async def test_a_pin_that_another_one_has_moved_is_forgotten(bus: Bus, pins: Bucket[SessionPin]) -> None:
    one, two = SessionPins(pins, 60, 10), SessionPins(pins, 60, 10)
    following = asyncio.create_task(one.follow())
    try:
        for key in ("moved", "deleted", "kept"):
            for cache in (one, two):
                await cache.claim(key, SessionPin("a", 1), lambda _pin: True, 0.0)
        await two.claim("moved", SessionPin("b", 1), lambda pin: pin.group == "b", 0.0)
        await pins.delete("deleted")
        await two.refresh("kept", 0.0)
        async with asyncio.timeout(10):
            while one.cached("moved", 0.0) or one.cached("deleted", 0.0):
                await bus.flush()
        assert one.cached("kept", 0.0) == SessionPin("a", 1)
        pin, outcome = await one.claim("moved", SessionPin("a", 1), lambda _pin: True, 0.0)
        assert (pin, outcome) == (SessionPin("b", 1), "adopted")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_pins_are_refreshed_once_per_fraction_of_their_time(pins: Bucket[SessionPin]) -> None:
    cache = SessionPins(pins, 60.0, 10)
    await cache.claim("k", SessionPin("a", 1), lambda _pin: True, 0.0)
    before = await pins.get("k")
    assert not cache.refresh_due("k", 14.9)
    assert cache.refresh_due("k", 15.0)
    assert not cache.refresh_due("k", 15.1)
    await cache.refresh("k", 15.0)
    after = await pins.get("k")
    assert after.revision > before.revision
    assert not cache.refresh_due("unknown", 0.0)
    await cache.refresh("unknown", 0.0)

    await pins.put("k", SessionPin("elsewhere", 2))
    await cache.refresh("k", 30.0)
    assert cache.cached("k", 31.0) == SessionPin("elsewhere", 2)
    assert cache.cached("k", 89.9) == SessionPin("elsewhere", 2)
    assert cache.cached("k", 90.0) is None, "the broker has forgotten it by then"

    await cache.claim("k", SessionPin("a", 1), lambda _pin: True, 91.0)
    await pins.delete("k")
    await cache.refresh("k", 91.0)
    assert cache.cached("k", 91.0) is None


async def test_the_cache_keeps_the_most_recently_used(pins: Bucket[SessionPin]) -> None:
    cache = SessionPins(pins, 60.0, 2)
    for key in ("a", "b"):
        await cache.claim(key, SessionPin(key, 1), lambda _pin: True, 0.0)
    assert cache.cached("a", 1.0) is not None
    await cache.claim("c", SessionPin("c", 1), lambda _pin: True, 1.0)
    assert cache.cached("b", 1.0) is None
    assert cache.cached("a", 1.0) is not None


async def test_a_pin_that_nobody_can_read_is_no_obstacle(bus: Bus, pins: Bucket[SessionPin]) -> None:
    await bus.jetstream().publish("$KV.sessions.k", b"\xc1")
    cache = SessionPins(pins, 60.0, 2)
    assert await cache.claim("k", SessionPin("a", 1), lambda _pin: True, 0.0) == (SessionPin("a", 1), "unpinned")


def test_keys_tell_models_and_sessions_apart() -> None:
    assert len({pin_key("a", "bc"), pin_key("ab", "c"), pin_key("a", "b"), pin_key("a", "b ")}) == 4
