"""What Triton's compiler makes of the kernels between a decoder's products, for the GPU they are for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

PROGRAM = "tests.unit.executor.triton_kernels.compile_fused"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, "-m", PROGRAM],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, int]] = json.loads(run.stdout)
    return found


def test_nothing_spills(compiled: dict[str, dict[str, int]]) -> None:
    assert [name for name, taken in compiled.items() if taken["stack"]] == []


def test_memory_is_read_sixteen_bytes_at_a_time(compiled: dict[str, dict[str, int]]) -> None:
    assert [name for name, taken in compiled.items() if not taken["wide_loads"]] == []


def test_registers_leave_room_for_half_of_the_threads_that_a_processor_holds(
    compiled: dict[str, dict[str, int]],
) -> None:
    """65,536 registers, 1,024 of 2,048 threads."""
    assert [name for name, taken in compiled.items() if taken["registers"] > 64] == []
