"""The entry point of the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.entry import main


def test_ctrl_c_while_packages_are_imported_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        assert name == "services.cli.commands.up"
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["ryzanstein", "up"])
    monkeypatch.setattr("services.cli.groups.import_module", interrupted)
    monkeypatch.setattr("services.cli.supervision.early_executor.start_early", lambda arguments: None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130


def test_packages_of_ours_are_not_taken_from_the_working_directory(tmp_path: Path) -> None:
    """A user's project may well have folders that are called `services` and `shared`."""
    for name in ("services", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    result = subprocess.run(
        [sys.executable, "-P", "-m", "services.cli", "serve", "scheduler", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--nats-url" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["status", "--data-dir", "nowhere"], 1),
        (["probe", "nothing"], 1),
        (["serve", "nothing"], 1),
        (["nothing"], 2),
        (["status", "--colour"], 2),
    ],
)
def test_exit_codes_are_those_of_the_page(tmp_path: Path, arguments: list[str], code: int) -> None:
    """docs/compatibility.md; what `launch`, `doctor`, `sla --check` and waiting commands end with their tests see."""
    command = [sys.executable, "-m", "services.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
