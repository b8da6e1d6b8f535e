"""The dry run on a CPU: two real processes over gloo, by the code that runs on GPUs."""

import pytest
import torch

from benchmarks.on_gpu import collective_speed
from benchmarks.on_gpu.collective_speed import TINY_SIZES


@pytest.mark.slow
def test_a_dry_run_gives_a_row_for_each_size_and_says_what_is_not_offered() -> None:
    rows = collective_speed.collective_speed(tiny=True)
    assert [row.key for row in rows] == [f"collectives/2/gloo/{size}" for size in TINY_SIZES] + [
        "collectives/2/symmetric"
    ]
    assert all(row.ok for row in rows)
    assert all(row.figure and row.figure > 0 for row in rows[:-1])
    assert rows[-1].figure is None


def test_without_gpus_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    [row] = collective_speed.collective_speed()
    assert (row.figure, row.note) == (None, "there is no GPU")
