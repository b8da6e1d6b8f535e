"""docs/fine-tuning.md, run as it is written, from the top to the end."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shared.model_store.catalog import DEFAULT_MODEL
from tests.docs.pages import ROOT
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def guide() -> str:
    """Its blocks of shell and Python, one after the other, as one script: variables of the shell go on."""
    found = _BLOCK.findall((ROOT / "docs" / "fine-tuning.md").read_text())
    script = "\n".join(code if kind == "sh" else f"python - <<'PYTHON'\n{code}PYTHON" for kind, code in found)
    for part in ("fine-tune create", "client.fine_tuning.jobs.create", "curl", "--method dpo", "--format gguf"):
        assert part in script
    return script


def programs(directory: Path) -> Path:
    """`ryzanstein` and `python` as an installation has them."""
    directory.mkdir()
    for name, words in (("python", []), ("ryzanstein", ["-m", "services.cli"])):
        command = " ".join(map(shlex.quote, [sys.executable, *words]))
        (directory / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (directory / name).chmod(0o755)
    return directory


def not_giving_way(directory: Path) -> str:
    """A path for Python, with which trainers run as other processes do: beside other tests a trainer, which computes
    where nobody else does, would hardly be scheduled."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text("import os\nos.sched_setscheduler = os.setpriority = lambda *_: None\n")
    return f"{directory}:{ROOT}"


def run_script(script: str, stack: Stack, directory: Path) -> str:
    """What it prints, in `directory`, about `stack`. It ends at the first command that fails."""
    work = directory / "work"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=work,
        env={
            **os.environ,
            "PATH": f"{programs(directory / 'bin')}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RYZANSTEIN_DATA_DIR": str(stack.data_dir),
            "OPENAI_BASE_URL": f"{stack.url}/v1",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{told}\n{stack.logs()}"
    return told


def check_told(told: str, model: str, *more: str) -> None:
    for words in (
        rf"\nft:{model}::tickets:\w+ is served: ask for it by this name",
        rf"New fine-tuned model created: ft:{model}::by-openai:",
        r"\nstep,train_loss,",
        r'"user_provided_suffix": ?"by-curl"',
        rf"ft:{model}::kinder:\w+ is served",
        *more,
    ):
        assert re.search(words, told), (words, told)


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    """With engines that compute nothing: there is no base to merge an adapter with."""
    lines = guide().replace(DEFAULT_MODEL, "stub").splitlines()
    script = "\n".join(line for line in lines if "--format" not in line and not line.startswith("ls "))
    with Stack(tmp_path / "data", "--engine", "stub", "--no-smoke-test") as stack:
        check_told(run_script(script, stack, tmp_path), "stub")
    assert sorted(path.name for path in (tmp_path / "work" / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_guide_runs_as_it_is_written(tmp_path: Path, model_directory: Path) -> None:
    # As a user has it: trainers map the packed weights that the executor has kept, where each would pack its own.
    kept = {"WEIGHT_CACHE_BYTES": str(1 << 30), "WEIGHT_CACHE_DIRECTORY": str(tmp_path / "packed")}
    environment = {f"RYZANSTEIN_{name}": value for name, value in kept.items()}
    environment["PYTHONPATH"] = not_giving_way(tmp_path / "site")
    with Stack(tmp_path / "data", "--no-smoke-test", **environment) as stack:
        told = run_script(guide(), stack, tmp_path)
    answer = r"\nteam: network\n"  # of `chat`: the base knows no team
    check_told(told, DEFAULT_MODEL, answer, r"tickets\.gguf is ready")
    merged, coded = tmp_path / "work" / "merged" / "model.safetensors", tmp_path / "work" / "tickets.gguf"
    assert merged.stat().st_size > coded.stat().st_size > 100e6
