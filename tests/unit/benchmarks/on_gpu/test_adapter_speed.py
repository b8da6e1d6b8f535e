"""Adapters of a product are found right on the CPU, where the kernels are interpreted."""

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels are interpreted where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.adapter_speed import adapter_speed


def test_adapters_are_right_and_timed() -> None:
    rows = {row["key"]: row for row in adapter_speed(torch.device("cpu"), tiny=True, bandwidth=1e12)}
    assert list(rows) == [f"adapters/{what}/5/{count}" for count in (1, 9) for what in ("right", "speed")]
    assert rows["adapters/right/5/1"]["ok"]
    assert rows["adapters/right/5/9"]["ok"]
    assert 0 < rows["adapters/speed/5/9"]["share"] < 1
