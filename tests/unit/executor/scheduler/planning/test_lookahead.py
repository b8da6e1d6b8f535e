"""Steps that are planned before the tokens of the step before them are known."""

from collections.abc import Callable

import pytest
from msgspec import structs

from services.executor.core.engine import SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import to_bytes
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.worker.launches import with_tokens
from shared.errors import InternalError, RingLost
from shared.messages import GenerationRequest, SamplingParams
from tests.unit.executor.scheduler.fake_engine import VOCAB, undisturbed
from tests.unit.executor.scheduler.stepped_ring import Ring, arrays, ask, lens


def own(name: str, length: int = 6, **fields: object) -> GenerationRequest:
    """A request whose prompt begins like no other's."""
    return ask(name, [(ord(name) + i * 7) % VOCAB for i in range(length)], **fields)  # type: ignore[arg-type]


# --- the plan --------------------------------------------------------------------------------------


def test_the_plan_names_the_rows_whose_tokens_it_computes() -> None:
    ring = Ring()
    ring.add(own("a", 3, max_tokens=9), own("b", 4, max_tokens=1), own("c", 5, max_tokens=9))
    first = ring.schedule()
    assert ring.look_ahead()
    plan, rows = ring.later
    assert [row.request.generation_id for row in rows] == ["a", "c"], "b ends with the token under way"
    assert arrays(plan, "token_ids", "positions", "sample_rows") == [[-1, -3], [3, 5], [0, 1]]
    assert (lens(plan), plan.num_decodes, plan.step) == ([1, 1], 2, first[0].step + 1)
    assert arrays(plan, "context_lens") == [[4, 6]]
    [tables], [slots] = arrays(plan, "block_tables"), arrays(plan, "slots")
    assert slots == [tables[0] * 4 + 3, tables[2] * 4 + 1]
    assert [row.sampling.position for row in rows] == [1, 1]


def test_two_steps_at_most_are_under_way() -> None:
    ring = Ring()
    assert ring.batcher.schedule_ahead() is None
    ring.add(own("a", 3, max_tokens=9))
    ring.schedule()
    assert ring.look_ahead()
    assert ring.batcher.schedule_ahead() is None
    with pytest.raises(InternalError, match="under way"):
        ring.batcher.schedule()


@pytest.mark.parametrize("quantized", [0, 24])
def test_steps_are_those_without_lookahead(quantized: int) -> None:
    """Where nothing turns up too late: the same sequences and positions in each."""
    plans = []
    for lookahead in (False, True):
        ring = Ring(blocks=24, lookahead=lookahead, num_quantized=quantized)
        ring.add(own("a", 5, max_tokens=20), own("b", 9, max_tokens=33), own("c", 2, max_tokens=11))
        ring.run()
        assert (ring.ahead > 25) == lookahead
        names = ("positions", "query_lens", "context_lens", "sample_rows")
        # What a sequence has filled that ends with it moves a step later: it is in no later step.
        plans.append([[arrays(plan, *names) for plan, _ in ring.plans], ring.engine.compressions])
    assert plans[0] == plans[1]


def test_a_final_prompt_chunk_may_be_under_way() -> None:
    ring = Ring(tokens=8)
    ring.add(own("a", 12, max_tokens=5))
    first = ring.schedule()
    assert not ring.look_ahead(), "the prompt goes on"
    ring.finish(first)
    ring.schedule()
    assert ring.look_ahead()
    assert arrays(ring.later[0], "positions") == [[12]]


# --- when not --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(bad_words=[[1, 2]]),
        SamplingParams(allowed_token_ids=[1, 2]),
    ],
)
def test_not_where_sampling_edits_logits(sampling: SamplingParams) -> None:
    ring = Ring()
    ring.add(own("a", max_tokens=9), own("b", max_tokens=9, sampling=sampling))
    ring.schedule()
    assert not ring.look_ahead()


def test_log_probabilities_and_seeds_are_no_hindrance() -> None:
    ring = Ring()
    ring.add(own("a", sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=3, logprobs=2)))
    ring.schedule()
    assert ring.look_ahead()


def test_not_past_whoever_can_be_admitted() -> None:
    ring = Ring(sequences=2)
    ring.add(own("a", max_tokens=9), own("b", max_tokens=3))
    ring.step()
    step = ring.schedule()
    ring.add(own("c"))
    assert ring.look_ahead(), "there is no place for c"
    ring.finish(step)
    step = ring.schedule()
    assert not ring.look_ahead(), "b ends with this step, and c gets its place"
    ring.finish(step)
    assert "c" in [row.request.generation_id for row in ring.schedule()[1]]


def test_not_where_the_batch_lane_would_give_up_a_place() -> None:
    ring = Ring(sequences=1)
    ring.add(own("a", max_tokens=9, lane="batch"))
    ring.schedule()
    ring.add(own("b"))
    assert not ring.look_ahead()


def test_not_where_blocks_run_out() -> None:
    ring = Ring(blocks=5)
    ring.add(own("a", 7, max_tokens=8), own("b", 7, max_tokens=8))
    ring.step()
    assert len(ring.schedule()[1]) == 2  # both fill their second block
    assert not ring.look_ahead()
    assert ring.batcher.preemptions == 0


def test_not_while_something_is_handed_over() -> None:
    ring = Ring()
    ring.add(own("a", max_tokens=9))
    step = ring.schedule()
    ring.batcher.exchange.command(b"x")
    assert not ring.look_ahead()
    ring.finish(step)
    step = ring.schedule()
    assert step[0].handover == b"x"
    assert ring.look_ahead()


def test_not_where_there_is_nothing_left_to_compute() -> None:
    ring = Ring()
    ring.add(own("a", max_tokens=1), own("b", max_tokens=2))
    step = ring.schedule()
    ring.batcher.cancel(["b"])
    assert not ring.look_ahead()
    ring.finish(step)
    assert not ring.batcher.has_work


@pytest.mark.parametrize(("context", "blocks"), [(8, 64), (200, 2)])
def test_nothing_is_computed_beyond_context_and_cache(context: int, blocks: int) -> None:
    ring = Ring(context=context, blocks=blocks)
    ring.add(own("a", 7, max_tokens=50))
    ring.schedule()
    assert ring.look_ahead() == (context == 200)
    if ring.later is not None:
        ring.finish((ring.plans[-2][0], list(ring.batcher._steps.oldest.rows)))
        assert not ring.look_ahead()


# --- what turns up too late -------------------------------------------------------------------------


def test_after_a_stop_token_the_later_row_is_in_vain_and_the_blocks_stay() -> None:
    text = undisturbed(own("a", 6, max_tokens=9), 9)
    ring = Ring()
    ring.add(own("a", 6, max_tokens=9, stop_token_ids=[text[1]]), own("b", max_tokens=9))
    ring.step()
    step = ring.schedule()
    assert ring.look_ahead()
    entries = ring.finish(step)
    assert [(e.generation_id, e.finish) for e in entries] == [("a", "stop"), ("b", "")]
    assert ring.batcher.load().free_blocks == 64 - 2 - 2, "a's blocks are written to"
    step = ring.schedule()
    assert step[0].num_decodes == 2
    assert [e.generation_id for e in ring.finish(step)] == ["b"]
    assert ring.batcher.load().free_blocks == 64 - 3
    ring.run()
    assert ring.tokens("a") == text[:2]
    assert ring.tokens("b") == undisturbed(own("b", max_tokens=9), 9)


@pytest.mark.parametrize("steps_later", [0, 1])
@pytest.mark.parametrize(
    ("disturb", "ends"),
    [
        (lambda ring: ring.batcher.cancel(["a"]), ["cancelled"]),
        (lambda ring: ring.batcher.cancel(["a"], attempt=0), ["error"]),
        (lambda ring: ring.add(own("a", 6, max_tokens=4, attempt=1)), []),
    ],
)
def test_cancelled_withdrawn_and_replaced_at_any_moment(
    disturb: Callable[[Ring], None], ends: list[str], steps_later: int
) -> None:
    ring = Ring(sequences=2)
    ring.add(own("a", 6, max_tokens=9), own("b", 6, max_tokens=9))
    step = ring.schedule()
    assert ring.look_ahead()
    if steps_later:
        ring.finish(step)
        step = ring.schedule()
        ring.look_ahead()
    disturb(ring)
    ring.batcher.check()
    entries = ring.finish(step)
    while ring.later is not None:
        entries += ring.finish(ring.schedule())
    assert [e.finish for e in entries if e.generation_id == "a" and e.finish] == ends
    assert [e.tokens for e in entries if e.generation_id == "a" and not e.finish] == []
    ring.run()
    assert ring.tokens("b") == undisturbed(own("b", 6, max_tokens=9), 9)
    if not ends:
        assert [e.attempt for e in ring.log if e.generation_id == "a"][-4:] == [1, 1, 1, 1]
    assert ring.batcher.load().free_blocks == 64


# --- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [0, 24])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("behind", [0, 1])
def test_a_failed_step_takes_the_later_one_with_it(at: int, behind: int, quantized: int) -> None:
    """`at`: the step that is looked behind; `behind`: which of the two fails."""
    ring = Ring(blocks=24, num_quantized=quantized)
    requests = [own(name, 5, max_tokens=9) for name in ("a", "b", "c")]
    ring.add(*requests)
    for _ in range(at):
        ring.step()
    step = ring.schedule()
    assert ring.look_ahead()
    if behind:
        ring.finish(step)
        step = ring.schedule()
        assert ring.look_ahead()
    [end] = ring.fail(step, {1})
    assert (end.generation_id, end.finish) == ("b", "error")
    ring.run()
    assert ring.tokens("a") == undisturbed(requests[0], 9)
    assert ring.tokens("c") == undisturbed(requests[2], 9)
    assert ring.tokens("b") == undisturbed(requests[1], at + behind)
    assert ring.batcher.load().free_blocks == (quantized or 24)


def test_a_row_in_vain_that_fails_ends_nobody() -> None:
    text = undisturbed(own("a", 6, max_tokens=9), 9)
    ring = Ring()
    ring.add(own("a", 6, max_tokens=9, stop_token_ids=[text[0]]), own("b", max_tokens=9))
    step = ring.schedule()
    assert ring.look_ahead()
    ring.finish(step)
    assert ring.fail(ring.schedule(), {0}) == []
    ring.run()
    assert ring.tokens("b") == undisturbed(own("b", max_tokens=9), 9)


def test_fail_all_ends_both_steps() -> None:
    ring = Ring()
    ring.add(own("a", max_tokens=9), own("b", max_tokens=9))
    ring.schedule()
    assert ring.look_ahead()
    ring.batcher.cancel(["a"])
    ends = ring.take(ring.batcher.fail_all(RingLost("A rank is gone.")))
    assert [(e.generation_id, e.finish) for e in ends] == [("a", "cancelled"), ("b", "error")]
    ring.batcher.check()
    assert ring.batcher.load().free_blocks == 64
    assert ring.batcher.schedule() is None


def test_restores_are_not_looked_behind() -> None:
    """Else two steps would have to be undone that share what was not restored."""
    ring = Ring(blocks=6, context=60, ttl=100.0, num_host=20)
    ring.add(own("a", 16, max_tokens=2, session="s"))
    ring.run()
    ring.add(own("b", 19, max_tokens=2))
    ring.run()
    ring.add(ask("a2", own("a", 16).prompt + ring.tokens("a") + [1, 2], max_tokens=4, session="s"))
    step = ring.schedule()
    assert step[0].restores
    assert not ring.look_ahead()
    ring.finish(step)
    ring.schedule()
    assert ring.look_ahead()


# --- drafts ----------------------------------------------------------------------------------------


def test_drafts_that_pay_are_not_given_up() -> None:
    ring = Ring(drafts=3, right=1.0)
    drafter = ring.batcher.drafter
    ring.add(own("a", max_tokens=60))
    ring.step()
    [sequence] = ring.batcher._planner.running
    assert not Drafter.may_rest(drafter, [sequence]), "nothing is known yet"
    for _ in range(12):
        ring.step()
    assert drafter.accepted
    assert not Drafter.may_rest(drafter, [sequence])


def test_without_drafts_that_come_true_steps_are_planned_ahead_with_a_look_now_and_then() -> None:
    ring = Ring(drafts=3, right=0.0, lookahead=True)
    drafter = ring.batcher.drafter
    drafter.may_rest = lambda sequences: Drafter.may_rest(drafter, sequences)  # type: ignore[method-assign]
    ring.add(own("a", max_tokens=150))
    ring.run()
    assert ring.tokens("a") == undisturbed(own("a", max_tokens=150), 150)
    assert 90 <= ring.ahead <= 125
    assert drafter.drafted


def test_a_predicted_text_is_looked_for() -> None:
    ring = Ring(drafts=3)
    ring.add(own("a", prediction=[1, 2, 3]))
    ring.step()
    drafter = ring.batcher.drafter
    drafter._gain = 0.0
    assert not Drafter.may_rest(drafter, ring.batcher._planner.running)


# --- the engine's side -----------------------------------------------------------------------------


def test_tokens_are_put_in_where_the_plan_names_rows() -> None:
    ring = Ring()
    ring.add(own("a"), own("b"))
    ring.schedule()
    ring.look_ahead()
    plan = ring.later[0]
    assert arrays(with_tokens(plan, [SampledToken(7), SampledToken(9)]), "token_ids") == [[7, 9]]
    assert arrays(with_tokens(plan, []), "token_ids") == [[0, 0]], "the step before has failed"
    known = structs.replace(plan, token_ids=to_bytes([4, 5]))
    assert with_tokens(known, []) is known


def test_the_later_state_draws_what_the_sequence_will_draw() -> None:
    state = SamplingState(SamplingParams(temperature=1.0, seed=5), [1, 2], [3])
    later = state.later()
    assert (state.position, later.position) == (1, 2)
    state.advance(9)
    assert later.uniform() == state.uniform()
    assert later.candidates == state.candidates
