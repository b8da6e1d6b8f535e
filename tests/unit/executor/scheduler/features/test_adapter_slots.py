"""Who may be computed with which adapter, and when: slots, turns, and what a plan says of them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.step_plan import as_int32
from services.executor.scheduler.adapter_slots import LOADS_PER_STEP, NO_SLOT, AdapterSlots
from services.executor.scheduler.features.adapters import SlotClaims
from services.executor.scheduler.sequence import Sequence
from shared.errors import InvalidRequest
from shared.messages import GenerationRequest
from tests.unit.executor.scheduler.fake_engine import undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, ask


def digest(number: int) -> str:
    return f"{number:064x}"


def with_adapter(name: str, number: int, **fields: object) -> GenerationRequest:
    return ask(name, adapter=digest(number), **fields)  # type: ignore[arg-type]


def ring_of(slots: int, adapters: int, **options: int) -> Ring:
    ring = Ring(max_adapters=slots, **options)
    for number in range(adapters):
        ring.batcher.adapter_ready(digest(number), digest(number))
    return ring


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_everybody_gets_a_turn_and_no_slot_is_replaced_in_use(
    count: int, arrivals: list[tuple[int, int]], places: int
) -> None:
    """Sequences of (adapter, steps that it takes) arrive one per step: each runs after finitely many."""
    slots, waiting, running, done = AdapterSlots(count), list[list[int]](), list[list[int]](), 0
    for step in range(3000):
        if step < len(arrivals):
            adapter, length = arrivals[step]
            waiting.append([adapter, length, NO_SLOT])
        claims = SlotClaims(slots)
        for one in list(waiting):
            sequence = Sequence(with_adapter("one", one[0]), step, BLOCK, b"")
            if len(running) < places and claims.admits(sequence):
                one[2] = slots.take(digest(one[0]))
                waiting.remove(one)
                running.append(one)
        slots.check((slot, digest(adapter)) for adapter, _, slot in running)
        assert len(slots.take_loads()) <= LOADS_PER_STEP
        assert running or not waiting, "all wait for each other"
        for one in list(running):
            one[1] -= 1
            if not one[1]:
                slots.release(one[2])
                running.remove(one)
                done += 1
        if done == len(arrivals):
            return
    raise AssertionError("somebody never had a turn")


def test_who_waits_is_not_passed_by_for_ever() -> None:
    """One adapter's requests never end to arrive; another one's has its turn as soon as those that ran have ended."""
    ring = ring_of(1, 2, sequences=4)
    ring.add(with_adapter("first", 0, max_tokens=6))
    ring.step()
    ring.add(with_adapter("other", 1, max_tokens=3))
    for number in range(20):
        ring.add(with_adapter(f"more-{number}", 0, max_tokens=6))
        ring.step()
        if ring.tokens("other"):
            break
    assert number < 8
    ring.run()
    assert ring.tokens("other") == undisturbed(with_adapter("other", 1), 3)


@pytest.mark.parametrize("slots", [16, 64])
def test_fifty_adapters_are_in_use_with_more_or_fewer_slots(slots: int) -> None:
    ring = ring_of(slots, 50, blocks=4096, tokens=256, sequences=64)
    rng = random.Random(3)
    requests = [
        with_adapter(f"g{number}", rng.randrange(50), prompt=rng.randrange(1, 30), max_tokens=rng.randrange(1, 20))
        for number in range(90)
    ]
    ring.add(*requests)
    ring.run()
    assert all(ring.tokens(one.generation_id) == undisturbed(one, one.max_tokens) for one in requests)
    used = len({one.adapter for one in requests})
    assert len(ring.batcher.adapters) == min(slots, used)
    if slots > used:
        assert ring.engine.adapter_loads == used, "each is read once"


def test_rows_with_and_without_an_adapter_share_a_step() -> None:
    ring = ring_of(2, 2)
    ring.add(ask("plain"), with_adapter("a", 0), with_adapter("b", 1))
    plan, _ = ring.schedule()
    assert as_int32(plan.adapters).tolist() == [-1, 0, 1]
    assert plan.adapter_loads == [(0, digest(0)), (1, digest(1))]
    ring.finish((plan, _))
    plan, _ = ring.schedule()
    assert (as_int32(plan.adapters).tolist(), plan.adapter_loads) == ([-1, 0, 1], [])
    ring.finish((plan, _))
    ring.run()
    ring.add(ask("alone"))
    assert ring.schedule()[0].adapters == b"", "nobody has one"


def test_blocks_are_shared_with_the_same_adapter_alone() -> None:
    ring = ring_of(2, 2)
    ring.add(with_adapter("a", 0, prompt=13))
    ring.run()
    ring.add(ask("plain", 13), with_adapter("b", 1, prompt=13), with_adapter("c", 0, prompt=13))
    ring.run()
    found = {name: max(e.cached_tokens for e in ring.log if e.generation_id == name) for name in ("plain", "b", "c")}
    assert found == {"plain": 0, "b": 0, "c": 12}


def test_the_batch_lane_makes_way() -> None:
    """A long request of the batch lane gives up its adapter's slot, and has the same text in the end."""
    ring = ring_of(1, 2)
    slow = with_adapter("slow", 0, max_tokens=40, lane="batch")
    ring.add(slow)
    ring.step()
    ring.add(with_adapter("quick", 1, max_tokens=2))
    for _ in range(3):
        ring.step()
    assert ring.last("quick").finish == "length"
    ring.run()
    assert ring.tokens("slow") == undisturbed(slow, 40)


def test_an_adapter_that_cannot_be_had_ends_its_own_requests() -> None:
    ring = ring_of(2, 1)
    ring.add(with_adapter("a", 0), with_adapter("b", 1), with_adapter("c", 2))
    assert ring.batcher.adapters_in_use == {digest(0), digest(1), digest(2)}
    ring.batcher.adapter_failed(digest(1), InvalidRequest("The adapter's files are gone."))
    ring.run()
    assert (ring.last("b").error, ring.last("b").retryable) == ("The adapter's files are gone.", False)
    assert ring.last("a").finish == "length"
    assert ring.batcher.load().waiting == 1
    ring.batcher.adapter_ready(digest(2), digest(2))
    ring.run()
    assert ring.last("c").finish == "length"
    ring.batcher.adapter_gone(digest(0))
    ring.add(with_adapter("d", 0))
    assert not ring.batcher.has_work, "its files are not there any more"
