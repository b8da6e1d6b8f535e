"""Fine-tuning on a GPU: the section's code on the CPU with tiny shapes, and what arithmetic says of the 7B."""

import time
from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu.bench import Bench, read_rows
from benchmarks.on_gpu.shapes import LLAMA_7B
from benchmarks.on_gpu.training_speed import DRY, QLORA, run


def test_a_step_is_measured_and_a_job_projected(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), True, tmp_path / "rows", time.monotonic() + 600)
    run(bench)
    assert not torch.are_deterministic_algorithms_enabled()
    rows = {row.key: row.figure for row in read_rows(tmp_path / "rows")}
    assert list(rows) == ["training/tiny/int4/tokens", "training/tiny/int4/projected"]
    tokens, minutes = rows.values()
    assert tokens is not None
    assert minutes is not None
    assert minutes * 60 * tokens == pytest.approx(10_000 * DRY.length)


def test_the_work_of_a_7b_is_six_operations_a_weight_and_some() -> None:
    weights = LLAMA_7B.layers * LLAMA_7B.layer_weights
    assert weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert QLORA.factors == 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008)), "as peft has with all linears"
    each = QLORA.flops(10) / (10 * QLORA.length)
    assert 6.0 * weights < each < 6.3 * weights
    assert 5e9 < QLORA.held_bytes < 8e9
