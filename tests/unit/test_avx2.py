"""`python -m tests.avx2` hides what is newer than AVX2 from all that looks."""

import json
import os
import shutil
import signal
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


def test_why_nothing_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avx2, "_may_mount", lambda: True)
    assert avx2.problem(NEWER, root=True) == ""
    assert "root" in avx2.problem(NEWER, root=False)
    assert "no AVX2" in avx2.problem("flags : sse4_2 avx", root=True)
    monkeypatch.setattr(avx2, "_may_mount", lambda: False)
    assert "CAP_SYS_ADMIN" in avx2.problem(NEWER, root=True)


@pytest.mark.parametrize(
    ("cpuinfo", "root", "told"), [(NEWER, False, "root"), (avx2.as_avx2(NEWER), True, "nothing newer")]
)
def test_where_nothing_is_to_be_hidden_or_can_be_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cpuinfo: str,
    root: bool,
    told: str,
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(avx2, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(avx2, "_may_mount", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1 - root)
    with pytest.raises(SystemExit) as ended:
        avx2.main(["--if-newer", "false"])
    assert ended.value.code == 0
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.slow
def test_a_command_runs_as_on_a_processor_with_avx2() -> None:
    if told := avx2.problem(avx2.CPUINFO.read_text(errors="replace"), root=os.geteuid() == 0):
        pytest.skip(told)
    command = [sys.executable, "-m", "tests.avx2"]
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


@pytest.mark.slow
def test_strictly_a_newer_instruction_is_the_end(tmp_path: Path) -> None:
    if told := avx2.problem(avx2.CPUINFO.read_text(errors="replace"), root=os.geteuid() == 0):
        pytest.skip(told)
    for tool in ("gcc", avx2.STRICT[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    ends = {}
    for level, name in (("avx2", "ymm0"), ("avx512f", "zmm0")):
        source = f'int main(void) {{ __asm__ volatile("vpaddd %%{name}, %%{name}, %%{name}" ::: "xmm0"); return 7; }}'
        (tmp_path / "main.c").write_text(source)
        subprocess.run(["gcc", tmp_path / "main.c", "-o", tmp_path / level], check=True)
        command = [sys.executable, "-m", "tests.avx2", "--strict", str(tmp_path / level)]
        ends[level] = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, check=False
        ).returncode
    assert ends == {"avx2": 7, "avx512f": 256 - signal.SIGILL}
