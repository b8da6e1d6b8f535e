"""What a ring refuses, and what a failed step leaves."""

import pytest

from services.executor.core.engine import EngineSpec
from services.executor.core.sampling_state import SamplingState
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.errors import ConfigurationError, InternalError, RingLost
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import BLOCK, Ring, ask

# --- failures --------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_sequences_and_spares_the_others() -> None:
    ring = Ring(tokens=8, sequences=2)
    ring.add(ask("a"), ask("b", 3), ask("c"))
    ring.schedule()
    ends = ring.take(ring.batcher.fail_step(InternalError("It broke.")))
    assert {(e.generation_id, e.finish, e.error_code, e.error) for e in ends} == {
        ("a", "error", "internal_error", "It broke."),
        ("b", "error", "internal_error", "It broke."),
    }
    ring.run()
    assert ring.tokens("c") == undisturbed(ask("c"), 4)


def test_a_failed_row_ends_alone_and_the_rest_of_the_step_is_computed_again() -> None:
    ring = Ring()
    ring.add(ask("a"), ask("b"), ask("c"))
    ring.step()
    ring.schedule()
    [end] = ring.take(ring.batcher.fail_step(InternalError("NaN"), rows=[1]))
    assert end.generation_id == "b"
    ring.run()
    assert ring.tokens("a") == undisturbed(ask("a"), 4)
    assert ring.tokens("c") == undisturbed(ask("c"), 4)


def test_fail_all_ends_everything_and_leaves_nothing() -> None:
    ring = Ring(sequences=2)
    ring.add(ask("a"), ask("b"), ask("c"))
    ring.schedule()
    ring.batcher.cancel(["a"])
    ends = ring.take(ring.batcher.fail_all(RingLost("A rank is gone.")))
    assert [(e.generation_id, e.finish, e.retryable) for e in ends] == [
        ("a", "cancelled", False),
        ("b", "error", True),
        ("c", "error", True),
    ]
    assert not ring.batcher.has_work
    ring.batcher.check()


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (ask("a", 200), "context_length_exceeded", "context is 200"),
        (ask("a", 170), "context_length_exceeded", "KV cache of 160"),
        (ask("a", []), "invalid_request", "no tokens"),
        (ask("a", max_tokens=-1), "invalid_request", "max_tokens is -1"),
        (ask("a", [1, VOCAB]), "invalid_request", "prompt has a token outside"),
        (ask("a", [-1]), "invalid_request", "vocabulary of 50"),
        (ask("a", generated=[1 << 40]), "invalid_request", "generated has a token outside"),
        (ask("a", sampling=SamplingParams(temperature=float("nan"))), "invalid_request", "temperature is nan"),
        (ask("a", sampling=SamplingParams(logit_bias={50: 1.0})), "invalid_request", "logit_bias"),
        (ask("a", sampling=SamplingParams(repetition_penalty=0)), "invalid_request", "repetition_penalty"),
    ],
)
def test_refusals_say_what_is_wrong(request_: GenerationRequest, code: str, words: str) -> None:
    ring = Ring(blocks=40)
    refusal = ring.batcher.add(request_)
    assert (refusal.generation_id, refusal.code, refusal.retryable) == ("a", code, False)
    assert words in refusal.message
    assert not ring.batcher.has_work


def test_a_full_queue_refuses_for_now() -> None:
    ring = Ring(waiting=2)
    ring.add(ask("a"), ask("b"))
    refusal = ring.batcher.add(ask("c"))
    assert (refusal.code, refusal.retryable) == ("queue_full", True)
    ring.step()
    ring.add(ask("c"))


def test_settings_that_do_not_go_together_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"max_batch_tokens.*max_sequences"):
        Scheduler(EngineSpec(BLOCK, 8, 100, VOCAB), BatchSettings(max_batch_tokens=63))


def test_the_memory_of_ended_generations_is_bounded() -> None:
    batcher = Scheduler(EngineSpec(BLOCK, 8, 100, VOCAB), BatchSettings())
    for name in range(5000):
        batcher.add(ask(str(name), max_tokens=1, generated=[1]))
    assert len(batcher._ended) == 4096
    batcher.add(ask("4999", max_tokens=1, generated=[1]))
    assert len(batcher.take_entries()["gateway"]) == 5000


def test_check_sees_a_lost_sequence() -> None:
    ring = Ring()
    ring.add(ask("a"))
    ring.step()
    ring.batcher._planner.running.clear()
    with pytest.raises(AssertionError):
        ring.batcher.check()


def test_the_sampling_state_counts_positions_over_attempts() -> None:
    ring = Ring()
    ring.add(ask("a", generated=[1, 2], max_tokens=9, attempt=1))
    _, [sequence] = ring.schedule()
    assert isinstance(sequence.sampling, SamplingState)
    assert sequence.sampling.position == 2
