"""The command as it is called, on a machine without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import start
from benchmarks.on_gpu.device import card
from benchmarks.on_gpu.sections import HEADLINE, QUICK, SECTIONS, chosen
from benchmarks.on_gpu.wheels import download_command, missing, sentence

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_a_dry_run_fills_the_table_and_the_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--only", "decode,machine"]
    command += ["--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [(section["name"], section["status"]) for section in report["sections"]] == [
        ("machine", "done"),
        ("decode", "done"),
    ]
    rows = {row["key"]: row for section in report["sections"] for row in section["rows"]}
    assert {"machine/copy", "machine/bf16", "decode/tiny/bf16/kv-fp8/40/2"} <= rows.keys()
    assert all(row["figure"] and row["ok"] for row in rows.values()), rows
    assert "decode tiny, bf16 weights, fp8 KV, context 40, batch 2" in done.stdout


def ended(monkeypatch: pytest.MonkeyPatch, *options: str) -> int | str | None:
    """What the command ends with."""
    monkeypatch.setattr("sys.argv", ["gpu", *options])
    with pytest.raises(SystemExit) as end:
        start()
    return end.value.code


@pytest.mark.skipif(card() is not None, reason="this machine has a GPU")
def test_without_a_gpu_it_refuses_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "--json", str(tmp_path / "gpu.json")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: There is no NVIDIA GPU here")
    assert said.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()


def test_sections_are_listed_and_an_unknown_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not ended(monkeypatch, "--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [section.name for section in (*SECTIONS, HEADLINE)]
    assert ended(monkeypatch, "--dry-run", "--only", "decode,nonsense") == 2
    assert "There is no section nonsense; there are machine, " in capsys.readouterr().err


def test_a_quick_run_is_a_few_sections_and_names_go_before_it() -> None:
    assert chosen([], quick=True) == list(QUICK)
    assert chosen([]) == list(SECTIONS)
    assert [section.name for section in chosen(["headline", "decode"], quick=True)] == ["decode", "headline"]


def test_what_is_missing_is_said_with_the_remedy() -> None:
    absent = missing({"json": "here", "no_such_module_anywhere": "not-here"})
    assert absent == ["not-here"]
    assert "pip install --no-index --no-deps --target /tmp/site wheels/*.whl" in sentence(absent)


def test_wheels_are_asked_for_another_machine(tmp_path: Path) -> None:
    command = download_command(tmp_path, {"msgspec": "1.0", "a": "2"}, "3.12")
    assert command[-2:] == ["a==2", "msgspec==1.0"]
    assert {"--only-binary=:all:", "--no-deps", "3.12", "manylinux2014_x86_64"} <= set(command)
