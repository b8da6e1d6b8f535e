"""Who goes first: lanes, arrival, and batch sequences that make way within one step."""

import pytest

from shared.messages import GenerationRequest
from tests.unit.executor.scheduler.fake_engine import undisturbed
from tests.unit.executor.scheduler.stepped_ring import Ring, ask


def test_lanes_before_arrival_and_fifo_within_a_lane() -> None:
    ring = Ring(tokens=4, sequences=4)
    names = [("b1", "batch"), ("i1", "interactive"), ("i2", "interactive"), ("r1", "recovery")]
    ring.add(*(ask(name, 4, max_tokens=1, lane=lane) for name, lane in names))
    ring.run()
    assert [entry.generation_id for entry in ring.log] == ["r1", "i1", "i2", "b1"]


def test_an_urgent_prompt_goes_before_the_rest_of_a_batch_prompt() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("bulk", 60, lane="batch"))
    ring.step()
    ring.add(ask("quick", 6))
    assert [entry.generation_id for entry in ring.step()] == ["quick"]


def test_a_batch_sequence_gives_its_place_to_an_interactive_one() -> None:
    ring = Ring(sequences=2)
    ring.add(ask("b1", lane="batch", max_tokens=8), ask("b2", lane="batch", max_tokens=8))
    ring.step()
    ring.add(ask("i"))
    assert [entry.generation_id for entry in ring.step()] == ["b1", "i"]
    ring.run()
    assert ring.tokens("b2") == undisturbed(ask("b2"), 8)


def test_batch_sequences_stay_where_their_blocks_would_not_be_enough() -> None:
    ring = Ring(blocks=10, sequences=3)
    ring.add(ask("i1", 24, max_tokens=8), ask("b", 4, lane="batch", max_tokens=8))
    ring.step()
    ring.step()
    ring.add(ask("i2", 30))
    ring.step()
    assert ring.batcher.load().running == 2
    assert ring.batcher.preemptions == 0


def test_interactive_sequences_do_not_make_way_for_recovery() -> None:
    ring = Ring(sequences=1)
    ring.add(ask("i"))
    ring.step()
    ring.add(ask("r", lane="recovery"))
    assert [entry.generation_id for entry in ring.step()] == ["i"]


def bulk(count: int, prompt: int = 5, max_tokens: int = 12) -> list[GenerationRequest]:
    return [ask(f"b{n}", prompt, max_tokens, lane="batch") for n in range(count)]


def computed(ring: Ring) -> set[str]:
    """Whose tokens the last step has computed."""
    return {chunk.sequence.request.generation_id for chunk in ring.batcher.under_way}


@pytest.mark.parametrize("lane", ["interactive", "recovery"])
def test_several_arrivals_get_their_places_in_one_step(lane: str) -> None:
    ring = Ring(tokens=32, sequences=4)
    ring.add(*bulk(4))
    ring.step()
    ring.add(*(ask(f"i{n}", lane=lane) for n in range(3)))
    assert {entry.generation_id for entry in ring.step()} == {"b0", "i0", "i1", "i2"}
    ring.run()
    for request in bulk(4):
        assert ring.tokens(request.generation_id) == undisturbed(request, 12)


def test_no_more_make_way_than_the_step_can_begin_with() -> None:
    ring = Ring(tokens=16, sequences=4)
    ring.add(*bulk(4, prompt=3))
    ring.step()
    ring.add(ask("i0", 20), ask("i1", 20))
    ring.step()
    assert ring.batcher.preemptions == 1
    ring.step()
    assert ring.batcher.preemptions == 2


def test_blocks_of_the_batch_lane_are_given_up_before_the_next_step() -> None:
    ring = Ring(blocks=16, tokens=64, sequences=4)
    ring.add(*bulk(3, prompt=17))
    ring.step()
    ring.add(ask("i", 40, max_tokens=2))
    assert "i" in {entry.generation_id for entry in ring.step()}
    ring.run()
    for request in bulk(3, prompt=17):
        assert ring.tokens(request.generation_id) == undisturbed(request, 12)


def test_an_urgent_prompt_has_the_whole_budget() -> None:
    """Neither a prompt of the batch lane nor its decodes take a token from it."""
    ring = Ring(tokens=8, sequences=4)
    ring.add(*bulk(2, prompt=3), ask("long", 30, lane="batch"))
    ring.step()
    ring.add(ask("i", 24, max_tokens=3))
    for _ in range(3):
        step = ring.schedule()
        assert computed(ring) == {"i"}
        entries = ring.finish(step)
    assert [entry.generation_id for entry in entries] == ["i"]
    step = ring.schedule()
    assert computed(ring) == {"i", "b0", "b1", "long"}, "what is left goes to the batch lane"
    ring.finish(step)
    ring.run()
    for request in bulk(2, prompt=3):
        assert ring.tokens(request.generation_id) == undisturbed(request, 12)


def test_a_full_queue_of_batch_requests_keeps_no_other_out() -> None:
    ring = Ring(sequences=1, waiting=2)
    ring.add(*bulk(3)[:1])
    ring.step()
    ring.add(*bulk(3)[1:])
    refusal = ring.batcher.add(ask("b3", lane="batch"))
    assert refusal.code == "queue_full"
    ring.add(ask("i0"), ask("i1", lane="recovery"))
    refusal = ring.batcher.add(ask("i2"))
    assert refusal.code == "queue_full"


def test_a_starved_batch_request_ends_at_its_deadline() -> None:
    ring = Ring(sequences=1)
    ring.add(ask("i", max_tokens=30), ask("b", lane="batch", deadline=100.0), ask("c", lane="batch"))
    ring.step()
    assert not ring.batcher.expire(99.0)
    assert ring.batcher.expire(100.0)
    ring.step()
    last = ring.last("b")
    assert (last.finish, last.error_code, last.retryable) == ("error", "deadline_exceeded", False)
    ring.run()
    assert len(ring.tokens("c")) == 4, "what has no deadline waits"


def test_a_deadline_is_for_the_first_token_alone() -> None:
    ring = Ring(sequences=1)
    ring.add(ask("b", lane="batch", max_tokens=6, deadline=100.0))
    ring.step()
    ring.add(ask("i"))
    ring.step()
    assert ring.batcher.load().waiting == 1, "preempted, and waiting"
    assert not ring.batcher.expire(1000.0)
    ring.run()
    assert ring.tokens("b") == undisturbed(ask("b"), 6)


def test_what_is_computed_ahead_goes_before_the_batch_lane_and_makes_way_for_others() -> None:
    ring = Ring(tokens=8, sequences=2)
    ring.add(*bulk(1, prompt=12, max_tokens=2), ask("ahead", 20, max_tokens=1, prefill=True))
    order = []

    def step() -> None:
        plan = ring.schedule()
        order.append(computed(ring))
        ring.finish(plan)

    step()
    ring.add(ask("i0", 8, max_tokens=2), ask("i1", 8, max_tokens=1))
    while ring.batcher.has_work:
        step()
    assert order[0] == {"ahead"}
    assert order[1:3] == [{"i0"}, {"i0", "i1"}], "its place is lent, its blocks stay in the cache"
    assert [entry.generation_id for entry in ring.log if entry.finish] == ["i0", "i1", "ahead", "b0"]
    assert ring.batcher.preemptions == 1
    assert ring.tokens("ahead") == undisturbed(ask("ahead", 20), 1)


def test_what_is_computed_ahead_keeps_nobody_out() -> None:
    ring = Ring(waiting=1, sequences=1)
    ring.add(ask("runs"))
    ring.step()
    ring.add(ask("ahead", prefill=True))
    assert ring.batcher.interactive == 1
    ring.add(ask("i"))
    assert ring.batcher.add(ask("more", prefill=True)) is not None
    ring.run()
    assert [entry.generation_id for entry in ring.log if entry.finish] == ["runs", "i", "ahead"]
