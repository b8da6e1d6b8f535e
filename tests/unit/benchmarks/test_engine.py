"""The plans that the engine benchmark runs are plans a ring could get."""

import pytest

from benchmarks.engine.__main__ import DECODES, PREFILLS, milliseconds
from benchmarks.engine.steps import BLOCK, decode_plan, prefill_plan
from services.executor.core.step_plan import StepPlan, as_int32


def check(plan: StepPlan) -> None:
    tokens, sequences = len(as_int32(plan.token_ids)), len(as_int32(plan.query_lens))
    contexts = as_int32(plan.context_lens)
    assert as_int32(plan.query_lens).sum() == tokens == len(as_int32(plan.positions))
    assert len(as_int32(plan.block_tables)) == sum(-(-int(context) // BLOCK) for context in contexts)
    slots = as_int32(plan.slots)
    assert len(set(slots.tolist())) == tokens, "no two tokens share a slot"
    assert set((slots // BLOCK).tolist()) <= set(as_int32(plan.block_tables).tolist())
    assert len(contexts) == sequences
    assert as_int32(plan.sample_rows).max() < tokens


@pytest.mark.parametrize(("sequences", "context"), DECODES)
def test_decodes(sequences: int, context: int) -> None:
    plan = decode_plan(sequences, context)
    assert plan.num_decodes == sequences
    check(plan)


@pytest.mark.parametrize("tokens", PREFILLS)
def test_prefills(tokens: int) -> None:
    check(prefill_plan(tokens))


def test_only_counted_rounds_are_timed() -> None:
    calls: list[None] = []
    assert milliseconds(lambda: calls.append(None), 5) >= 0
    assert len(calls) == 8
