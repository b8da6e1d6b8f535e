"""What the compiler makes of the kernels for Hopper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

PROGRAM = "tests.unit.executor.gpu.compile_products"
MOST_SHARED = 227 << 10
"""Bytes of shared memory that a processor of Hopper has for its programs."""


def test_kernels_fit_a_processor_of_hopper_without_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"few rows", "one row", "encode"}
    assert all(kernel["stack"] == 0 for kernel in found.values()), found
    few, one = found["few rows"], found["one row"]
    # Tensor cores multiply, and weights come while they do.
    assert few["products"] > 0, found
    assert min(few["copies"], one["copies"]) > 0, found
    # Two programs of the largest tiles fit, four of one row: enough weights are on their way.
    assert few["registers"] * 128 * 2 <= 65536, found
    assert few["shared"] * 2 <= MOST_SHARED, found
    assert one["registers"] * 128 * 4 <= 65536, found
    assert one["shared"] * 4 <= MOST_SHARED, found
