"""The plans that the engine benchmark runs are plans a ring could get."""

from pathlib import Path

import pytest

from benchmarks.engine import floors
from benchmarks.engine.__main__ import DECODES, PREFILLS
from benchmarks.engine.floors import Rates, floor_of
from benchmarks.engine.kv_decode import Long
from benchmarks.engine.steps import BLOCK, Decode, Prefill, decode_plan, load_one_rank
from benchmarks.random_model import LlamaShape, write_checkpoint
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.native.library import why_not
from shared.messages import SparseAttention
from tests.unit.executor.model.tiny import settings_for


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
def test_floors_count_what_a_step_of_random_weights_reads_and_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "NUMBERS", 1 << 16)
    settings = settings_for("qwen3_5_text", head_dim=32, tie_word_embeddings=True)
    floors.write_random(tmp_path, {"model_type": "qwen3_5_text", **settings})
    runner, store = load_one_rank(tmp_path, "bf16", 2, 64)
    assert store.states is not None
    for kind in (Decode(3, 40), Prefill(40)):
        steps = kind.steps(64, 0)
        for plan in (*steps.before, steps.measured):
            runner.forward(plan)
    one, three = floor_of(runner, store, 1, 32, 1), floor_of(runner, store, 3, 32, 3)
    assert three.nbytes - one.nbytes == 2 * (2 * store.states.slot_bytes + 32 // BLOCK * store.shape.bytes_per_block)
    assert three.operations == 3 * one.operations
    assert one.operations < one.nbytes < 2 * one.operations, "bf16 weights, padded, and a state"
    assert one.milliseconds(Rates(1e6, 1e12)) == one.nbytes / 1e3


@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
def test_floors_count_sampled_rows_alone_where_layers_store_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "NUMBERS", 1 << 16)
    settings = settings_for("gemma4_text", head_dim=32)
    floors.write_random(tmp_path, {"model_type": "gemma4_text", **settings})
    runner, store = load_one_rank(tmp_path, "bf16", 2, 64)
    one, prompt = floor_of(runner, store, 1, 32, 1), floor_of(runner, store, 1, 32, 32)
    assert runner.packed is not None
    *_, last = runner.packed.layers
    readers = 2 * sum(linear.outputs * linear.inputs for linear in last.linears)
    assert 16 * one.operations < prompt.operations < 32 * one.operations - 31 * readers


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
