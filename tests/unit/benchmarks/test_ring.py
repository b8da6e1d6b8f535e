"""The figures of the ring benchmark from known times, and its processes on a tiny model."""

from pathlib import Path

import pytest
import torch

from benchmarks.engine.steps import BLOCK, Decode, Prefill, Steps, decode_plan
from benchmarks.random_model import LlamaShape, write_checkpoint
from benchmarks.ring import RingReport, Share, measure_steps, sheets, timing
from services.executor.collectives.base import SingleRank
from services.executor.collectives.shared_memory import can_share_memory
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import as_int32
from services.executor.model.loading.loader import load_config, load_model
from tests.unit.executor.model.tiny import make_model


def test_timing_takes_medians() -> None:
    shares = [
        [Share(0.1, 0.05), Share(0.3, 0.2)],
        [Share(0.2, 0.06), Share(0.4, 0.3)],
        [Share(0.9, 0.9), Share(0.5, 0.4)],
    ]
    found = timing(decode_plan(16, 32), [0.5, 0.1, 0.2], shares)
    assert found.milliseconds == pytest.approx(200)
    assert found.tokens_per_second == pytest.approx(80)
    assert found.shares == [Share(0.2, 0.06), Share(0.4, 0.3)]


@pytest.mark.nightly
@pytest.mark.skipif(not can_share_memory(), reason="no C compiler, or not Linux")
def test_one_rank_and_two_run_the_same_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    settings: dict[str, object] = {"model": str(model), "dtype": "fp32", "device": "cpu", "kv_memory": 1 << 22}
    scalings = measure_steps(settings, {"decode": Decode(2, 20), "prefill": Prefill(8)}, rounds=1)
    assert [scaling.step for scaling in scalings] == ["decode", "prefill"]
    for scaling in scalings:
        assert scaling.ratio > 0
        assert scaling.one.shares == [Share(0.0, 0.0)]
        assert all(0 < share.waiting <= share.communication for share in scaling.two.shares)
    about = {"date": "today", "command": "a command", "machine": "a machine"}
    report = RingReport(**about, scalings=scalings)
    assert len(sheets(report)[0].rows) == 4


@pytest.mark.parametrize("num_quantized", [0, 100])
def test_every_block_that_a_decode_reads_has_been_computed(num_quantized: int) -> None:
    num_writable = 60
    steps: Steps = Decode(4, 50).steps(num_writable, num_quantized)
    computed: set[int] = set()
    for plan in steps.before:
        slots = as_int32(plan.slots)
        assert slots.max(initial=0) < num_writable * BLOCK
        computed.update((slots // BLOCK).tolist())
        kept = dict(as_int32(plan.compressions).reshape(-1, 2).tolist())
        assert all(num_writable <= quantized < num_writable + num_quantized for quantized in kept.values())
        assert set(kept) <= computed
        computed.update(kept.values())
        *table, last = as_int32(plan.block_tables).tolist()
        written = (slots[::BLOCK] // BLOCK).tolist()
        assert [kept.get(block, block) for block in written[:-1]] == table
        assert written[-1] == last
    table = as_int32(steps.measured.block_tables)
    assert len(set(table.tolist())) == len(table) == 4 * 4
    assert set(table.tolist()) <= computed
    assert (as_int32(steps.measured.slots) // BLOCK == table.reshape(4, 4)[:, -1]).all()
    assert bool((table >= num_writable).any()) == bool(num_quantized)


def test_a_random_model_has_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LlamaShape.parse("64,4,2,96,3,50"))
    config = load_config(tmp_path)
    assert (config.num_key_value_heads, config.intermediate_size, config.num_hidden_layers) == (2, 96, 3)
    collectives = SingleRank()
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(tmp_path, torch.float32, layout, collectives, torch.device("cpu"), lambda done, total: None)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("text", ["", "64,4,2", "64,4,3,96,3,50", "65,4,2,96,3,50", "64,4,0,96,3,50", "a,4,2,96,3,50"])
def test_shapes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not hidden,heads|must be a multiple"):
        LlamaShape.parse(text)
