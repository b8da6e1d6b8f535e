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
