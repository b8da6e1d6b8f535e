"""`ryzanstein up` before it starts anything."""

import subprocess
import sys

import pytest

from services.cli.commands.up import _renamed

WATCHED = (
    "httpx",
    "markdown_it",
    "uvicorn",
    "psutil",
    "services.cli.commands.main",
    "services.cli.chat_client",
    "torch",
)


def test_services_do_not_wait_for_what_other_commands_import() -> None:
    code = f"import sys, services.cli.commands.up; print([name for name in {WATCHED} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_what_is_wrong_with_its_options_is_told_in_a_sentence() -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--engine", "steam"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert said.stderr == "error: --engine cannot be 'steam'; it is one of torch, stub.\n"


def test_its_usage_names_the_command() -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.strip().startswith("Usage: ryzanstein up [OPTIONS]")


def test_the_old_name_of_the_smoke_test_is_taken_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert [_renamed(None, wanted) for wanted in (True, False)] == [True, False]
    assert capsys.readouterr().err == ""
    assert _renamed(False, True) is False
    assert "--smoke-test" in capsys.readouterr().err
