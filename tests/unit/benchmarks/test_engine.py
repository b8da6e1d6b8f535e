"""The plans that the engine benchmark runs are plans a ring could get."""

from pathlib import Path

import pytest

from benchmarks.engine.__main__ import DECODES, PREFILLS
from benchmarks.engine.kv_decode import Long
from benchmarks.engine.steps import BLOCK, Prefill, decode_plan
from benchmarks.random_model import LlamaShape, write_checkpoint
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.native.library import why_not
from shared.messages import SparseAttention


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
    check(Prefill(tokens).steps(64, 0).measured)


@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
def test_long_contexts_are_decoded_dense_and_sparse(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LlamaShape.parse("64,2,1,64,2,128"))
    long = Long(tmp_path, 1, 512, SparseAttention(threshold=64, recent=32, budget=64, dense_layers=0))
    assert long.kv(512) == 512 * 2 * 2 * 32 + 32 * 2 * 2 * 4, "codes, and a scale for each block and head"
    assert long.weights > 0
    steps = long.steps(500)
    dense, attended = steps["dense"]()
    assert dense > attended > 0
    assert min(steps["sparse"]()) > 0
