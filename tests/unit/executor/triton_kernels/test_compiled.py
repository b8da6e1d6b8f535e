"""What Triton's compiler makes of the kernels for an H200, which need not be there: in a process of its own, since the
interpreter has decorated this one's."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the GPU kernels are compiled where Triton is (Linux on x86-64)")


def test_kernels_compile_without_spilled_registers() -> None:
    """A few variants, the most demanding ones among them; `python -m benchmarks.on_gpu.compiled` takes all."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.on_gpu.compiled", "--some"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    head, *lines = found.stdout.splitlines()
    names = head.split("  ")
    assert "wgmma" in " ".join(names)
    kernels = {line[:48].strip() for line in lines}
    assert {"decode fp8 d128 group4 splits8", "decode fp8 d128 group4 splits8 merge", "write"} <= kernels
