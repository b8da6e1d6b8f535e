"""The kernels that sample, through Triton's compiler for an H200: the interpreter takes what the compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the GPU kernels are compiled where Triton is (Linux on x86-64)")


def test_kernels_that_sample_compile() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.executor.triton_kernels.compile_sampling"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    shared = {name: int(size) for name, size in map(str.split, found.stdout.splitlines())}
    assert shared.keys() == {"tally", "choose", "weigh", "draw"}
    assert max(shared.values()) <= 8192  # bytes: programs share a multiprocessor by their registers
