"""Continuous batching: order, budget, preemption, prefix reuse, endings and refusals, one by one."""

import random

import pytest

from services.executor.engine.admission import BatchSettings
from services.executor.engine.batching import ContinuousBatcher, Entries
from services.executor.engine.plan import StepPlan, as_int32
from services.executor.engine.protocol import EngineSpec, SampledToken
from services.executor.engine.sampling_state import SamplingState
from services.executor.engine.sequence import Sequence
from shared.errors import ConfigurationError, InternalError, RingLost
from shared.messages import GenerationRequest, SamplingParams, TokenEntry, TokenLogprobs
from tests.unit.executor.engine.fake_engine import VOCAB, FakeEngine, undisturbed

BLOCK = 4


def ask(name: str, prompt: int | list[int] = 5, max_tokens: int = 4, **fields: object) -> GenerationRequest:
    tokens = [(i * 7 + len(name)) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    return GenerationRequest(name, "r", "m", "gateway", tokens, max_tokens, **fields)  # type: ignore[arg-type]


class Ring:
    """A batcher with the fake engine, stepped by hand."""

    def __init__(
        self, blocks: int = 64, tokens: int = 16, sequences: int = 4, waiting: int = 100, context: int = 200
    ) -> None:
        self.batcher = ContinuousBatcher(
            EngineSpec(BLOCK, blocks, context, VOCAB), BatchSettings(tokens, sequences, waiting), "m"
        )
        self.engine = FakeEngine(EngineSpec(BLOCK, blocks, context, VOCAB))
        self.log: list[TokenEntry] = []
        self.plans: list[tuple[StepPlan, list[str]]] = []

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            assert self.batcher.add(request) is None

    def take(self, entries: Entries) -> list[TokenEntry]:
        new = [entry for batch in entries.values() for entry in batch]
        self.log += new
        return new

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        step = self.batcher.schedule()
        assert step is not None
        self.plans.append((step[0], [s.request.generation_id for s in step[1]]))
        return step

    def finish(self, step: tuple[StepPlan, list[Sequence]]) -> list[TokenEntry]:
        plan, sequences = step
        entries = self.batcher.update(self.engine.execute(plan, [s.sampling for s in sequences]))
        self.batcher.check()
        return self.take(entries)

    def step(self) -> list[TokenEntry]:
        return self.finish(self.schedule())

    def run(self) -> None:
        while self.batcher.has_work:
            step = self.batcher.schedule()
            if step is None:
                assert self.take(self.batcher.take_entries())
            else:
                self.finish(step)

    def tokens(self, name: str) -> list[int]:
        return [token for entry in self.log if entry.generation_id == name for token in entry.tokens]

    def last(self, name: str) -> TokenEntry:
        return [entry for entry in self.log if entry.generation_id == name][-1]


def lens(plan: StepPlan) -> list[int]:
    return as_int32(plan.query_lens).tolist()


# --- the plan ------------------------------------------------------------------------------------


def test_a_step_mixes_decodes_and_prompt_chunks_within_the_budget() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("a", 3), ask("b", 20))
    plan, sampled = ring.schedule()
    assert (lens(plan), plan.num_decodes, [s.request.generation_id for s in sampled]) == ([3, 5], 0, ["a"])
    assert as_int32(plan.sample_rows).tolist() == [2]
    assert as_int32(plan.positions).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert as_int32(plan.context_lens).tolist() == [3, 5]
    assert len(as_int32(plan.block_tables)) == 1 + 2
    ring.finish((plan, sampled))
    plan, sampled = ring.schedule()
    assert (lens(plan), plan.num_decodes, plan.step) == ([1, 7], 1, 2)
    assert as_int32(plan.context_lens).tolist() == [4, 12]
    assert as_int32(plan.positions).tolist() == [3, *range(5, 12)]


def test_a_prompt_chunk_of_one_token_goes_with_the_decodes_and_is_not_sampled() -> None:
    ring = Ring(tokens=4)
    ring.add(ask("a", 3), ask("b", 20))
    plan, sampled = ring.schedule()
    assert lens(plan) == [1, 3]
    assert plan.num_decodes == 1
    assert [s.request.generation_id for s in sampled] == ["a"]
    assert as_int32(plan.sample_rows).tolist() == [3]


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("a", 3, max_tokens=10))
    ring.step()
    ring.add(ask("long", 90))
    for _ in range(9):
        assert "a" in [entry.generation_id for entry in ring.step()]


def test_a_step_samples_nothing_inside_a_prompt() -> None:
    ring = Ring(tokens=8)
    ring.add(ask("a", 20))
    plan, sampled = ring.schedule()
    assert (plan.sample_rows, sampled) == (b"", [])
    assert ring.finish((plan, sampled)) == []


def test_one_step_at_a_time() -> None:
    ring = Ring()
    assert ring.batcher.schedule() is None
    ring.add(ask("a"))
    ring.schedule()
    with pytest.raises(InternalError, match="under way"):
        ring.batcher.schedule()
    with pytest.raises(InternalError, match="0 tokens for 1"):
        ring.batcher.update([])


# --- order ---------------------------------------------------------------------------------------


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


# --- blocks --------------------------------------------------------------------------------------


def test_the_youngest_of_the_least_urgent_lane_gives_up_its_blocks() -> None:
    ring = Ring(blocks=9, tokens=32)
    requests = [
        ask("old", 8, max_tokens=9),
        ask("bulk", 8, max_tokens=9, lane="batch"),
        ask("newest", 8, max_tokens=9),
    ]
    ring.add(*requests)
    seen: list[set[str]] = []
    while ring.batcher.preemptions == 0:
        seen.append({entry.generation_id for entry in ring.step()})
    assert seen[-2] == {"old", "newest", "bulk"}
    assert seen[-1] == {"old", "newest"}
    ring.run()
    for request in requests:
        assert ring.tokens(request.generation_id) == undisturbed(request, 9)
        assert ring.last(request.generation_id).finish == "length"
    assert ring.batcher.load().free_blocks == 9


def test_text_is_the_same_however_often_a_sequence_is_preempted() -> None:
    rng = random.Random(7)
    ring = Ring(blocks=14, tokens=12, sequences=5)
    requests = [
        ask(
            str(i),
            [j % 3 for j in range(rng.randint(1, 30))],
            max_tokens=rng.randint(1, 20),
            lane=rng.choice(["interactive", "batch"]),
            sampling=SamplingParams(seed=i),
        )
        for i in range(60)
    ]
    ring.add(*requests)
    ring.run()
    assert ring.batcher.preemptions > 10
    assert ring.engine.largest <= 12
    for request in requests:
        assert ring.tokens(request.generation_id) == undisturbed(request, request.max_tokens)


def test_a_sequence_that_outgrows_the_whole_cache_ends_with_an_error() -> None:
    ring = Ring(blocks=3)
    ring.add(ask("a", 8, max_tokens=100))
    ring.run()
    last = ring.last("a")
    assert (last.finish, last.error_code, last.retryable) == ("error", "context_length_exceeded", False)
    assert "KV cache of 12 tokens" in last.error
    assert ring.tokens("a") == undisturbed(ask("a", 8), 5)
    assert ring.batcher.load().free_blocks == 3


def test_a_prompt_that_fills_the_whole_cache_is_computed() -> None:
    ring = Ring(blocks=4)
    ring.add(ask("small", 4, max_tokens=4), ask("whole", 16, max_tokens=1))
    ring.run()
    assert ring.tokens("whole") == undisturbed(ask("whole", 16), 1)


def test_a_waiting_sequence_takes_the_room_that_another_leaves() -> None:
    ring = Ring(blocks=4)
    ring.add(ask("a", 12, max_tokens=3), ask("b", 12, max_tokens=3))
    ring.step()
    load = ring.batcher.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 12)
    assert (load.free_blocks, load.total_blocks) == (1, 4)
    ring.run()
    assert ring.tokens("b") == undisturbed(ask("b", 12), 3)


# --- prefix cache --------------------------------------------------------------------------------


def test_the_next_turn_finds_prompt_and_answer_of_the_one_before() -> None:
    ring = Ring(tokens=32)
    first = ask("turn-1", 9, max_tokens=8)
    ring.add(first)
    ring.run()
    assert ring.log[0].cached_tokens == 0
    answer = ring.tokens("turn-1")
    # 9 prompt tokens and 7 of the answer are in the cache; the last token was never computed.
    second = ask("turn-2", [*first.prompt, *answer, 1, 2, 3])
    ring.add(second)
    [entry] = ring.step()
    assert entry.cached_tokens == 16
    assert lens(ring.plans[-1][0]) == [4]
    [entry] = ring.step()
    assert entry.cached_tokens == 0
    ring.run()
    assert ring.tokens("turn-2") == undisturbed(second, 4)


def test_a_repeated_prompt_still_computes_its_last_block() -> None:
    ring = Ring()
    ring.add(ask("a", [1] * 8, max_tokens=1))
    ring.run()
    ring.add(ask("b", [1] * 8, max_tokens=1))
    [entry] = ring.step()
    assert entry.cached_tokens == 4
    assert lens(ring.plans[-1][0]) == [4]


def test_running_sequences_share_their_beginning() -> None:
    ring = Ring(blocks=6)
    ring.add(ask("a", [1] * 8 + [2], max_tokens=3))
    ring.step()
    ring.add(ask("b", [1] * 8 + [3], max_tokens=3))
    ring.step()
    assert ring.batcher.load().free_blocks == 6 - 4
    ring.run()
    assert ring.tokens("b") == undisturbed(ask("b", [1] * 8 + [3]), 3)


# --- endings -------------------------------------------------------------------------------------


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
    batcher = ContinuousBatcher(EngineSpec(BLOCK, 8, 100, VOCAB), BatchSettings())
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


# --- attempts ------------------------------------------------------------------------------------


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
    assert refusal is not None
    assert refusal.code == "queue_full"
    ring.run()
    assert [e.generation_id for e in ring.log].count("a") == 1
    ring.add(ask("a"))
    assert not ring.batcher.has_work


# --- failures ------------------------------------------------------------------------------------


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


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (ask("a", 200), "context_length_exceeded", "context is 200"),
        (ask("a", 170), "context_length_exceeded", "KV cache of 160"),
        (ask("a", []), "invalid_request", "no tokens"),
        (ask("a", max_tokens=0), "invalid_request", "max_tokens is 0"),
        (ask("a", [1, VOCAB]), "invalid_request", "prompt has a token outside"),
        (ask("a", [-1]), "invalid_request", "vocabulary of 50"),
        (ask("a", generated=[1 << 40]), "invalid_request", "generated has a token outside"),
        (
            ask("a", sampling=SamplingParams(temperature=float("nan"))),
            "invalid_request",
            "temperature is nan",
        ),
        (ask("a", sampling=SamplingParams(logit_bias={50: 1.0})), "invalid_request", "logit_bias"),
        (ask("a", sampling=SamplingParams(repetition_penalty=0)), "invalid_request", "repetition_penalty"),
    ],
)
def test_refusals_say_what_is_wrong(request_: GenerationRequest, code: str, words: str) -> None:
    ring = Ring(blocks=40)
    refusal = ring.batcher.add(request_)
    assert refusal is not None
    assert (refusal.generation_id, refusal.code, refusal.retryable) == ("a", code, False)
    assert words in refusal.message
    assert not ring.batcher.has_work


def test_a_full_queue_refuses_for_now() -> None:
    ring = Ring(waiting=2)
    ring.add(ask("a"), ask("b"))
    refusal = ring.batcher.add(ask("c"))
    assert refusal is not None
    assert (refusal.code, refusal.retryable) == ("queue_full", True)
    ring.step()
    ring.add(ask("c"))


@pytest.mark.parametrize(
    "settings",
    [BatchSettings(max_sequences=0), BatchSettings(max_waiting=-1), BatchSettings(max_batch_tokens=63)],
)
def test_bad_settings_are_named(settings: BatchSettings) -> None:
    with pytest.raises(ConfigurationError, match="max_"):
        ContinuousBatcher(EngineSpec(BLOCK, 8, 100, VOCAB), settings)


def test_the_memory_of_ended_generations_is_bounded() -> None:
    batcher = ContinuousBatcher(EngineSpec(BLOCK, 8, 100, VOCAB), BatchSettings())
    for name in range(5000):
        batcher.add(ask(str(name), max_tokens=1, generated=[1]))
    assert len(batcher._ended) == 4096
    batcher.add(ask("4999", max_tokens=1, generated=[1]))
    assert len(batcher.take_entries()["gateway"]) == 5000


def test_check_sees_a_lost_sequence() -> None:
    ring = Ring()
    ring.add(ask("a"))
    ring.step()
    ring.batcher._running.clear()
    with pytest.raises(AssertionError):
        ring.batcher.check()


def test_the_sampling_state_counts_positions_over_attempts() -> None:
    ring = Ring()
    ring.add(ask("a", generated=[1, 2], max_tokens=9, attempt=1))
    _, [sequence] = ring.schedule()
    assert isinstance(sequence.sampling, SamplingState)
    assert sequence.sampling.position == 2
