"""`python -m tests.avx2` hides what is newer than AVX2 from all that looks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.avx2 import __main__ as avx2

NEWER = "flags\t\t: fma avx2 f16c avx512f avx512_bf16 amx_bf16 amx_tile avx_vnni gfni avx512_vpopcntdq sha_ni\n"
ASKED = """
import json, torch
from services.executor.native import library
from services.executor.platforms.cpu import Cpu
print(json.dumps([torch.backends.cpu.get_cpu_capability(), Cpu().has_fast_bf16(), library._present()]))
"""


def test_what_is_newer_is_hidden() -> None:
    assert avx2.as_avx2(NEWER * 2) == "flags\t\t: fma avx2 f16c sha_ni\n" * 2


def test_what_was_on_the_path_stays_there() -> None:
    assert avx2.environment({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{avx2.HOOK}:/a:/b"
    assert avx2.environment({})["PYTHONPATH"] == str(avx2.HOOK)


def test_why_nothing_can_be_run() -> None:
    assert avx2.problem(NEWER, root=True) == ""
    assert "root" in avx2.problem(NEWER, root=False)
    assert "no AVX2" in avx2.problem("flags : sse4_2 avx", root=True)


@pytest.mark.slow
def test_a_command_runs_as_on_a_processor_with_avx2() -> None:
    if told := avx2.problem(avx2.CPUINFO.read_text(errors="replace"), root=os.geteuid() == 0):
        pytest.skip(told)
    command = [sys.executable, "-m", "tests.avx2"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    run = subprocess.run(
        [*command, sys.executable, "-c", ASKED],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    capability, fast, levels = json.loads(run.stdout.splitlines()[-1])
    assert (capability, fast) == ("AVX2", False)
    assert {*levels} <= {"avx2"}
    assert subprocess.run([*command, "sh", "-c", "exit 7"], check=False).returncode == 7
