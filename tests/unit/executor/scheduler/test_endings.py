"""How generations end, and what a newer attempt does to an older one."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.scheduler.admission import BatchSettings, kv_exhausted
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.sequence import Sequence
from shared.messages import GenerationRequest, TokenLogprobs
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, ask

# --- endings ---------------------------------------------------------------------------------------


def test_the_stop_token_is_in_the_last_entry() -> None:
    request = ask("a", max_tokens=50)
    stop = undisturbed(request, 3)[2]
    request = ask("a", max_tokens=50, stop_token_ids=[stop])
    ring = Ring()
    ring.add(request)
    ring.run()
    assert ring.last("a").tokens == [stop]
    assert ring.last("a").finish == "stop"
    assert ring.tokens("a") == undisturbed(request, 50)


def test_max_tokens_and_context_length_end_with_length() -> None:
    ring = Ring(context=12)
    ring.add(ask("a", 5, max_tokens=3), ask("b", 9, max_tokens=100))
    ring.run()
    assert len(ring.tokens("a")) == 3
    assert len(ring.tokens("b")) == 12 - 9
    assert ring.last("a").finish == ring.last("b").finish == "length"
    assert [e.position for e in ring.log if e.generation_id == "b"] == [0, 1, 2]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(4, 20), st.integers(1, 5), st.integers(0, 3))
def test_what_goes_on_is_what_nothing_ends(prompt: int, most: int, context: int, blocks: int, stop: int) -> None:
    spec, request = EngineSpec(BLOCK, blocks, context, VOCAB), ask("a", prompt, most, stop_token_ids=[stop])
    batcher = Scheduler(spec, BatchSettings())
    assume(batcher.add(request) is None)
    sequence = Sequence(request, 0, BLOCK, b"")
    for token in [1, 2, 3, 1, 2, 3, 1, 2, 3][:most]:
        assert batcher.schedule() is not None
        (entry,) = batcher.update([SampledToken(token)])["gateway"]
        sequence.append(token)
        ended = sequence.finish_reason(context) or kv_exhausted(len(sequence.tokens), spec)
        assert (entry.position, entry.tokens) == (sequence.output_tokens - 1, [token])
        assert bool(entry.finish) is bool(ended)
        if ended:
            return


def test_a_continuation_starts_after_the_tokens_it_has() -> None:
    request = ask("a", 6, max_tokens=7)
    text = undisturbed(request, 7)
    ring = Ring()
    ring.add(ask("a", 6, max_tokens=7, generated=text[:3], attempt=2))
    ring.run()
    assert [(e.position, e.attempt) for e in ring.log] == [(3, 2), (4, 2), (5, 2), (6, 2)]
    assert ring.tokens("a") == text[3:]


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({"max_tokens": 2, "generated": [3, 4]}, "length"),
        ({"max_tokens": 9, "generated": [3, 4], "stop_token_ids": [4]}, "stop"),
        ({"max_tokens": 9, "generated": [3] * 5}, "length"),
    ],
)
def test_a_continuation_that_was_over_ends_at_once(fields: dict[str, object], finish: str) -> None:
    ring = Ring(context=10)
    ring.add(ask("a", 5, attempt=1, **fields))  # type: ignore[arg-type]
    assert ring.batcher.has_work
    assert ring.batcher.schedule() is None
    [entry] = ring.take(ring.batcher.take_entries())
    assert (entry.finish, entry.tokens, entry.attempt) == (finish, [], 1)
    assert entry.position == len(fields["generated"])  # type: ignore[arg-type]
    assert not ring.batcher.has_work


def test_cancelled_while_waiting_and_while_running() -> None:
    ring = Ring(sequences=1)
    ring.add(ask("a"), ask("b"))
    ring.step()
    ring.batcher.cancel(["a", "b", "nobody"])
    ends = ring.take(ring.batcher.take_entries())
    assert [(e.generation_id, e.position, e.tokens, e.finish) for e in ends] == [
        ("a", 1, [], "cancelled"),
        ("b", 0, [], "cancelled"),
    ]
    assert ring.batcher.load().free_blocks == 64
    assert not ring.batcher.has_work


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_withdrawn_attempt_ends_as_an_error_that_another_ring_makes_good(in_flight: bool) -> None:
    ring = Ring()
    ring.add(ask("a", attempt=2, max_tokens=9))
    ring.step()
    scheduled = ring.batcher.schedule() if in_flight else None
    ring.batcher.cancel(["a"], attempt=1)
    assert ring.batcher.load().running == 1, "a command about an earlier attempt does not hit this one"
    ring.batcher.cancel(["a"], attempt=2)
    entries = ring.batcher.update([SampledToken(1)]) if scheduled else ring.batcher.take_entries()
    (end,) = ring.take(entries)
    assert (end.finish, end.retryable, end.error_code) == ("error", True, "no_group_available")
    assert (end.attempt, end.position) == (2, 1)
    assert not ring.batcher.has_work


@given(st.integers(0, 3), st.lists(st.tuples(st.booleans(), st.integers(-1, 4)), max_size=8), st.sampled_from([-1, 0]))
def test_who_owns_a_generation_no_more_ends_nothing_of_it(
    first: int, said: list[tuple[bool, int]], attempt: int
) -> None:
    """Claims and cancellations in any order: one counts that is no older than every claim told before it."""
    ring = Ring()
    ring.add(ask("a", claim=first))
    newest, over = first, False
    for is_claim, claim in said:
        if is_claim:
            ring.batcher.claim(["a", "nobody"], claim)
            newest = max(newest, claim)
        else:
            ring.batcher.cancel(["a"], attempt, claim)
            over = over or claim < 0 or claim >= newest
    assert bool(ring.take(ring.batcher.take_entries())) is over


def test_cancelled_in_flight_keeps_its_blocks_until_the_step_is_over() -> None:
    ring = Ring()
    ring.add(ask("a"))
    ring.step()
    step = ring.schedule()
    ring.batcher.cancel(["a"])
    ring.batcher.cancel(["a"])
    assert ring.batcher.take_entries() == {}
    assert ring.batcher.load().free_blocks == 62
    [entry] = ring.finish(step)
    assert (entry.tokens, entry.position, entry.finish) == ([], 1, "cancelled")
    assert ring.batcher.load().free_blocks == 64


def test_entries_are_grouped_by_consumer_and_carry_logprobs() -> None:
    batcher = Scheduler(EngineSpec(BLOCK, 8, 100, VOCAB), BatchSettings())
    for name, consumer in (("a", "x"), ("b", "y"), ("c", "x")):
        batcher.add(GenerationRequest(name, "r", "m", consumer, [1, 2, len(name)], 1))
    assert batcher.schedule() is not None
    logprobs = TokenLogprobs(-0.5, [(9, -0.1)])
    entries = batcher.update([SampledToken(7), SampledToken(8, logprobs), SampledToken(9)])
    assert {consumer: [e.generation_id for e in batch] for consumer, batch in entries.items()} == {
        "x": ["a", "c"],
        "y": ["b"],
    }
    assert entries["y"][0].logprobs == [logprobs]
    assert entries["x"][0].logprobs is None


# --- attempts --------------------------------------------------------------------------------------


def test_a_repeat_is_ignored_also_after_the_end() -> None:
    ring = Ring()
    ring.add(ask("a"), ask("a"))
    ring.step()
    ring.add(ask("a"))
    ring.run()
    assert ring.tokens("a") == undisturbed(ask("a"), 4)
    ring.add(ask("a"))
    assert not ring.batcher.has_work


def test_a_newer_attempt_replaces_the_older_one_silently() -> None:
    ring = Ring()
    ring.add(ask("a", max_tokens=6))
    ring.step()
    text = undisturbed(ask("a"), 6)
    ring.add(ask("a", max_tokens=6, attempt=1, generated=text[:1]))
    ring.add(ask("a", max_tokens=6))
    ring.run()
    assert [e.attempt for e in ring.log] == [0, 1, 1, 1, 1, 1]
    assert ring.tokens("a") == text


def test_a_newer_attempt_replaces_one_in_flight() -> None:
    ring = Ring()
    ring.add(ask("a", max_tokens=6))
    step = ring.schedule()
    ring.batcher.cancel(["a"])
    ring.add(ask("a", max_tokens=6, attempt=1))
    assert ring.finish(step) == []
    ring.run()
    assert {e.attempt for e in ring.log} == {1}
    assert ring.batcher.load().free_blocks == 64


def test_a_refused_newer_attempt_still_silences_the_older_one() -> None:
    ring = Ring(waiting=0)
    with pytest.raises(AssertionError):
        ring.add(ask("a"))
    ring = Ring(sequences=1, waiting=1)
    ring.add(ask("a"))
    ring.step()
    ring.add(ask("b"))
    refusal = ring.batcher.add(ask("a", attempt=1))
    assert refusal.code == "queue_full"
    ring.run()
    assert [e.generation_id for e in ring.log].count("a") == 1
    ring.add(ask("a"))
    assert not ring.batcher.has_work
