"""Requests find a ring: at once, in the right order, again after a refusal, and never lost."""

import asyncio
import time

from services.scheduler.service import SchedulerService
from shared.messages import GenerationRequest, GroupLoad, GroupTraits, Refusal, SparseAttention, TokenEntry
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from tests.integration.scheduler.cluster_fixture import MODEL, House


async def test_a_request_arrives_unchanged_and_leaves_the_stream(house: House) -> None:
    leader = await house.leader()
    async with house.scheduler():
        request = await house.ask("a", generated=[7, 8], attempt=2, tenant="t")
        await house.until(lambda: leader.requests == [request])
        await house.until_settled()
    assert house.entries == []


async def test_many_requests_arrive_once_each_over_several_groups(house: House) -> None:
    leaders = [await house.leader(f"g{index}") for index in range(4)]
    async with house.scheduler(dispatch_timeout=30):  # else a slow leader's requests go to another one too
        await asyncio.gather(*(house.ask(str(index)) for index in range(400)))
        await house.until(lambda: sum(len(leader.requests) for leader in leaders) == 400)
        await house.until_settled()
    counts = [len(leader.requests) for leader in leaders]
    assert sorted(name for leader in leaders for name in leader.ids) == sorted(map(str, range(400)))
    assert max(counts) - min(counts) <= 20, "within 5 % of the requests"
    assert max(size for leader in leaders for size in leader.batches) <= 128


async def test_requests_wait_durably_while_no_group_is_up_most_urgent_first(house: House) -> None:
    for name, lane in [("b1", "batch"), ("i1", "interactive"), ("r1", "recovery"), ("i2", "interactive")]:
        await house.ask(name, lane=lane)  # type: ignore[arg-type]
    leader = await house.leader(state="starting")
    async with house.scheduler(ack_wait=0.5) as service:
        await house.ask("b2", lane="batch")
        received = service._metrics.received
        await house.until_lanes(received, {"recovery": 1, "interactive": 2, "batch": 2})
        assert await house.left() == 5
        await leader.record("ready")
        await house.until(lambda: len(leader.requests) == 5)
        await house.until_settled()
    assert leader.ids == ["r1", "i1", "i2", "b1", "b2"]


async def test_sparse_attention_waits_for_a_group_that_computes_it(house: House) -> None:
    """Through that group's death, and in nobody's way."""
    pages, plain = await house.leader("pages"), await house.leader("plain")
    pages.traits, plain.traits = GroupTraits(["pages", "window"]), GroupTraits(["window"])
    plain.refuse = lambda request: (
        Refusal(request.generation_id, "invalid_request", "No pages here.", False) if request.sparse else None
    )
    await pages.record("ready")
    await plain.record("ready")
    asked = {"sparse": SparseAttention()}
    async with house.scheduler() as service:
        for number in range(6):
            await house.ask(f"first-{number}", **asked)
        await house.until(lambda: len(pages.requests) == 6)
        assert plain.requests == []
        await pages.record("gone")
        await until_state(house, service, "pages", "gone")
        for number in range(3):
            await house.ask(f"late-{number}", **asked)
        await house.ask("dense")
        await house.until(lambda: plain.ids == ["dense"])
        pages.epoch, known = 2, pages.traits
        pages.traits = None
        await pages.record("starting")
        await until_state(house, service, "pages", "starting")
        async with asyncio.timeout(15):
            while await house.left() > 3:  # the dense one is being settled
                await house.bus.flush()
        assert len(pages.requests) == 6
        pages.traits = known
        await pages.record("ready")
        await house.until(lambda: len(pages.requests) == 9)
        await house.until_settled()
        assert house.entries == []
        await house.records.delete("pages")
        await house.ask("never", **asked)
        await house.until(lambda: bool(house.entries))
    assert [(entry.generation_id, entry.error) for entry in house.entries] == [("never", "No pages here.")]


async def test_what_a_ring_does_not_compute_any_more_goes_to_another_group(house: House) -> None:
    """The ring has begun anew without page summaries, and its record says so later."""
    starting, changed = await house.leader("starting", state="starting"), await house.leader("changed")
    changed.traits = GroupTraits(["pages", "window"])
    await changed.record("ready")
    changed.epoch = 2
    changed.refuse = lambda request: Refusal(request.generation_id, "invalid_request", "No pages here.", False)
    async with house.scheduler():
        await house.ask("asks", sparse=SparseAttention())
        await house.until(lambda: bool(changed.batches))
        starting.traits = GroupTraits(["pages", "window"])
        await starting.record("ready")
        await house.until(lambda: starting.ids == ["asks"])
        await house.until_settled()
    assert house.entries == []


async def until_state(house: House, service: SchedulerService, name: str, state: str) -> None:
    """A scheduler has read so of a group."""
    async with asyncio.timeout(15):
        while (group := service._table.get(name)) is None or group.status != state:
            await house.bus.flush()


async def test_held_requests_stay_with_their_scheduler_beyond_ack_wait(house: House, bus: Bus) -> None:
    """The broker would hand them out again if it did not hear that they are being worked on."""
    async with house.scheduler(ack_wait=0.5) as service:
        await house.ask("a")
        await house.ask("late", deadline=time.time() + 1.5)
        await house.until(lambda: len(house.entries) == 1)
        info = await bus.jetstream().consumer_info(subjects.INTAKE_STREAM, "scheduler-interactive")
        assert info.num_redelivered == 0
        assert service._metrics.redelivered._value.get() == 0
        leader = await house.leader()
        await house.until(lambda: leader.ids == ["a"])


async def test_a_refused_request_goes_to_another_group(house: House) -> None:
    full, free = await house.leader("full"), await house.leader("free")
    full.refuse = lambda request: Refusal(request.generation_id, "queue_full", "Full.")
    async with house.scheduler():
        await house.ask_all(6)
        await house.until(lambda: len(free.requests) == 6)
        await house.until_settled()
    assert full.requests == []
    assert full.batches
    assert house.entries == []


async def test_a_refused_request_waits_for_the_only_group(house: House) -> None:
    leader = await house.leader()
    leader.refuse = lambda request: Refusal(request.generation_id, "queue_full", "Full.")
    async with house.scheduler():
        await house.ask("a")
        await house.until(lambda: len(leader.batches) >= 3)
        leader.refuse = lambda _request: None
        await house.until(lambda: leader.ids == ["a"])
        await house.until_settled()


async def test_a_hopeless_request_ends_with_the_rings_own_words(house: House) -> None:
    leader = await house.leader()

    def refuse(request: GenerationRequest) -> Refusal | None:
        if request.generation_id != "long":
            return None
        return Refusal("long", "context_length_exceeded", "Too long.", retryable=False)

    leader.refuse = refuse
    async with house.scheduler():
        await house.ask("long", generated=[1, 2], attempt=1)
        await house.ask("short")
        await house.until(lambda: leader.ids == ["short"] and len(house.entries) == 1)
        await house.until_settled()
    assert house.entries == [
        TokenEntry("long", 1, 2, [], "error", error_code="context_length_exceeded", error="Too long.", retryable=False)
    ]


async def test_a_silent_leader_is_passed_over(house: House) -> None:
    silent, other = await house.leader("silent"), await house.leader("zother")
    silent.silent = True
    async with house.scheduler():
        await house.ask_all(4)
        await house.until(lambda: sorted(other.ids) == ["0", "1", "2", "3"])
        await house.until_settled()


async def test_a_leader_that_died_unnoticed_is_passed_over_at_once(house: House) -> None:
    dead, other = await house.leader("dead"), await house.leader("other")
    async with house.scheduler(dispatch_timeout=60):
        await dead.stop()
        await house.ask_all(4)
        await house.until(lambda: sorted(other.ids) == ["0", "1", "2", "3"], 5)


async def test_a_lost_answer_means_the_request_is_handed_in_twice_and_kept_once(house: House) -> None:
    leader = await house.leader()
    leader.lost_replies = 1
    async with house.scheduler(dispatch_timeout=0.1, suspect_time=0.05):
        await house.ask("a")
        await house.until(lambda: leader.batches == [1, 1])
        await house.until_settled()
    assert leader.ids == ["a"]


async def test_groups_that_are_not_up_get_nothing(house: House) -> None:
    leaders = {
        state: await house.leader(state, state=state)  # type: ignore[arg-type]
        for state in ("starting", "hung", "draining", "gone", "busy")
    }
    async with house.scheduler():
        await house.ask_all(10)
        await house.until(lambda: len(leaders["busy"].requests) == 10)
    assert {state for state, leader in leaders.items() if leader.batches} == {"busy"}


async def test_an_event_counts_before_the_record(house: House) -> None:
    lost, other = await house.leader("lost"), await house.leader("other")
    async with house.scheduler():
        await house.event(lost, "down")
        await house.bus.flush()
        await house.ask_all(6)
        await house.until(lambda: len(other.requests) == 6)
    assert lost.batches == []


async def test_the_less_loaded_group_is_preferred(house: House) -> None:
    busy, idle = await house.leader("busy"), await house.leader("idle")
    busy.load = GroupLoad(running=8, waiting=8, waiting_tokens=5000, free_blocks=50, total_blocks=100)
    await busy.record("busy")
    async with house.scheduler():
        await house.ask_all(10)
        await house.until(lambda: len(idle.requests) == 10)
    assert not any(busy.batches), "more than the question whether a full ring has room"


async def test_while_a_batch_is_under_way_the_next_one_gathers(house: House) -> None:
    leader = await house.leader()
    leader.hold = asyncio.Event()
    async with house.scheduler(dispatch_timeout=30) as service:
        await house.ask_all(50)
        await house.until_lanes(service._metrics.received, {"interactive": 50})
        leader.hold.set()
        await house.until(lambda: len(leader.requests) == 50)
    assert len(leader.batches) <= 10
    assert leader.ids == [str(index) for index in range(50)]


async def test_large_requests_travel_in_batches_that_the_broker_takes(house: House) -> None:
    leader = await house.leader()
    leader.hold = asyncio.Event()
    large = [70_000] * (house.bus.max_payload // 18)
    async with house.scheduler(dispatch_timeout=30) as service:
        await house.ask_all(9, prompt=large)
        await house.until_lanes(service._metrics.received, {"interactive": 9})
        leader.hold.set()
        await house.until(lambda: len(leader.requests) == 9)
        await house.until_settled()
    assert max(leader.batches) <= 3
    assert house.entries == []


async def test_undecodable_requests_are_thrown_out(house: House, bus: Bus) -> None:
    leader = await house.leader()
    async with house.scheduler() as service:
        for payload in (b"no message pack \xc1", b"", b"\x81\xa1a\x01"):
            await bus.jetstream().publish(subjects.intake("interactive", MODEL), payload)
        await house.ask("a")
        await house.until(lambda: leader.ids == ["a"])
        await house.until_settled()
        assert service._metrics.undecodable._value.get() == 3


async def test_the_newer_attempt_replaces_the_older_one(house: House) -> None:
    leader = await house.leader(state="starting")
    async with house.scheduler() as service:
        await house.ask("a")
        await house.ask("a")
        newer = await house.ask("a", lane="recovery", attempt=1, generated=[5])
        await house.until_lanes(service._metrics.received, {"interactive": 2, "recovery": 1})
        await leader.record("ready")
        await house.until(lambda: bool(leader.requests))
        await house.until_settled()
    assert leader.requests == [newer]
    assert house.entries == []


async def test_consumers_are_shared_and_bounded_by_the_scheduler_alone(house: House, bus: Bus) -> None:
    leader = await house.leader()
    leader.hold = asyncio.Event()
    # No request is lost to the scheduler while the machine is busy: it would come back in another order.
    async with house.scheduler(held_requests=5, ack_wait=60, dispatch_timeout=30) as service:
        await house.ask_all(20, lane="batch")
        await house.until_lanes(service._metrics.received, {"batch": 5})
        info = await bus.jetstream().consumer_info(subjects.INTAKE_STREAM, "scheduler-batch")
        assert info.num_ack_pending == 5
        assert await house.left() == 20
        leader.hold.set()
        await house.until(lambda: leader.ids == [str(index) for index in range(20)])
        await house.until_settled()


async def test_what_is_gathered_for_a_lost_group_goes_elsewhere(house: House) -> None:
    """Its window is full, so requests gather behind it; then it is lost, and another group comes."""
    lost = await house.leader("lost")
    lost.hold = asyncio.Event()
    async with house.scheduler(dispatch_timeout=1.0) as service:
        await house.ask_all(10)
        await house.until_lanes(service._metrics.received, {"interactive": 10})
        other = await house.leader("other")
        await house.event(lost, "down")
        under_way = sum(lost.batches)
        await house.until(lambda: len(other.requests) >= 10 - under_way)
        lost.silent = True
        lost.hold.set()
        await house.until(lambda: len(other.requests) == 10)
        await house.until_settled()


async def test_a_request_too_large_for_a_batch_ends_with_that_reason(house: House) -> None:
    """It fits alone, but not with the words around it."""
    leader = await house.leader()
    filler = "x" * (house.bus.max_payload - 200)
    async with house.scheduler():
        small = await house.ask("b", tenant=filler)
        spare = house.bus.max_payload - len(encode(small))
        await house.ask("a", tenant=filler + "x" * (spare - 4))
        await house.until(lambda: bool(house.entries and leader.requests))
        await house.until_settled()
    assert leader.ids == ["b"]
    (entry,) = house.entries
    assert (entry.generation_id, entry.error_code, entry.retryable) == ("a", "payload_too_large", False)
    assert "max_payload" in entry.error
