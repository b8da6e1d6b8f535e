"""A random checkpoint is one that loads, and the measurement runs on a CPU."""

from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu.loading_speed import run
from benchmarks.random_model import SHAPES, bytes_of, write_checkpoint
from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.loading.loader import load_config, load_model
from tests.unit.benchmarks.on_gpu.bench_on_cpu import dry_bench

CPU = torch.device("cpu")


def test_a_random_checkpoint_loads(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    total = write_checkpoint(tmp_path / "model", shape, threads=2)
    assert total == bytes_of(shape)
    layout = ShardLayout.from_config(load_config(tmp_path / "model"), 1, 0)
    model = load_model(tmp_path / "model", torch.bfloat16, layout, SingleRank(), CPU, lambda *_: None)
    weights = dict(model.named_parameters())
    assert sum(weight.nbytes for weight in weights.values()) == total
    assert len(weights) == 3 + shape.layers * len(shape.layer)
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    for weight in matrices.values():
        assert 0.018 < float(weight.float().std()) < 0.022
    assert len({tuple(weight.flatten()[:4].tolist()) for weight in matrices.values()}) == len(matrices)
    assert all(bool((weight == 1).all()) for weight in weights.values() if weight.dim() == 1)


@pytest.mark.slow
def test_loading_is_measured() -> None:
    rows = list(run(dry_bench()))
    assert [row.key for row in rows] == ["loading/plain", "loading/reading", "loading/load", "loading/load-fp8"]
    assert all(row.figure and row.unit == "s" for row in rows)
