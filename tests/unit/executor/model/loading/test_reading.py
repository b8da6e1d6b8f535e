from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.executor.core.sharding import ShardRange
from services.executor.model.loading import reading
from services.executor.model.loading.composition import Composition
from services.executor.model.loading.reading import Read, ReadMeter, read_all
from services.executor.model.loading.weight_files import WeightFiles

CPU = torch.device("cpu")


def test_slices_are_cast_on_the_way_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 100)
    stored = {"a": torch.randn(37, 11), "n": torch.arange(6), "s": torch.tensor(2.5)}
    save_file(stored, tmp_path / "model.safetensors")
    reports: list[tuple[int, int]] = []
    with WeightFiles(tmp_path) as files:
        whole = {name: Composition.whole(name, shape) for name, shape in files.shapes.items()}
        made = read_all(
            [
                Read(whole["a"].selected(1, [ShardRange(2, 5), ShardRange(7, 9)]), torch.bfloat16),
                Read(whole["n"], torch.int64),
                Read(whole["s"], torch.float64),
                Read(whole["a"].transposed(0, 1).selected(0, [ShardRange(3, 4)]), torch.float32),
            ],
            files,
            CPU,
            lambda done, total: reports.append((done, total)),
        )
    assert torch.equal(made[0], stored["a"][:, [2, 3, 4, 7, 8]].bfloat16())
    assert torch.equal(made[1], stored["n"])
    assert made[2].item() == 2.5
    assert torch.equal(made[3], stored["a"].T[3:4])
    total = 37 * 5 * 2 + 6 * 8 + 8 + 37 * 4
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert len(reports) > 5


def test_progress_is_told_in_order_and_not_too_often() -> None:
    reports: list[tuple[int, int]] = []
    meter = ReadMeter(lambda done, total: reports.append((done, total)), 100_000)
    for _ in range(100_000):
        meter.add(1)
    meter.finish()
    assert reports[0] == (0, 100_000)
    assert reports[-1] == (100_000, 100_000)
    assert reports == sorted(set(reports))
    assert len(reports) <= 201
