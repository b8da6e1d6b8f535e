"""`ryzanstein up` before it starts anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.commands.up import _models, _renamed
from services.cli.groups import app
from shared.errors import ConfigurationError
from shared.model_store.catalog import DEFAULT_MODEL
from shared.registry import DeclaredAdapter

WATCHED = (
    "httpx",
    "markdown_it",
    "uvicorn",
    "psutil",
    "services.cli.commands.status",
    "services.cli.commands.chat",
    "services.cli.chat_client",
    "torch",
)


def test_services_do_not_wait_for_what_other_commands_import() -> None:
    code = "import sys; from services.cli.groups import app; from typer.testing import CliRunner as Runner; "
    code += "print(Runner().invoke(app, ['up', '--help']).exit_code, "
    code += f"[name for name in {WATCHED} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "0 []"


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--dtype", "auto, bf16, fp32"),
        ("--engine", "torch, vllm, stub"),
        ("--weight-dtype", ""),
        ("--kv-dtype", ""),
        ("--tool-parser", ""),
        ("--reasoning-parser", ""),
    ],
)
def test_what_is_wrong_with_its_options_is_told_in_a_sentence(option: str, choices: str) -> None:
    result = CliRunner().invoke(app, ["up", option, "steam"])
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception).startswith(f"{option} cannot be 'steam'; it is one of {choices}")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--served-model-name", "x" * 1000], "--served-model-name: "),
        (["--model", "org/a", "--model", "org/b", "--served-model-name", "org/b"], "org/b.* is declared twice"),
        (["--model", "org/a", "--model", "org/a"], "Two models are called 'org/a', org/a and org/a; leave one out"),
        (["org/a", "org/a"], "Two models are called 'org/a', org/a and org/a; leave one out"),
        (["--model", "org/b", "org/a", "--served-model-name", "org/b"], "org/b.* is declared twice"),
        (["org/a", "org/b", "--engine", "vllm"], "a second --model is for the executors' own rings"),
        (["--models-file", "FILE", "--served-model-name", "mine"], "for the executors' own model"),
    ],
)
def test_a_name_that_cannot_be_served_is_refused(tmp_path: Path, options: list[str], reason: str) -> None:
    (tmp_path / "models.yaml").write_text("models: [{name: a, source: org/a}]")
    given = [str(tmp_path / "models.yaml") if option == "FILE" else option for option in options]
    result = CliRunner().invoke(app, ["up", *given])
    assert isinstance(result.exception, ConfigurationError)
    assert re.search(reason, str(result.exception))


def test_its_usage_names_the_command() -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.strip().startswith("Usage: ryzanstein up [OPTIONS]")


def test_the_old_name_of_the_smoke_test_is_taken_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert [_renamed(None, wanted) for wanted in (True, False)] == [True, False]
    assert capsys.readouterr().err == ""
    assert _renamed(False, True) is False
    assert "--smoke-test" in capsys.readouterr().err


def test_models_beside_the_first_are_told_from_their_names(tmp_path: Path) -> None:
    assert _models([], "") == (DEFAULT_MODEL, [], [])
    assert _models(["org/name"], "") == ("org/name", [], [])
    (tmp_path / "two").mkdir()
    first, further, _ = _models(["org/name", str(tmp_path / "two"), "org/q:Q4_K_M"], "")
    assert first == "org/name"
    assert [(spec.name, spec.least) for spec in further] == [("two", 1), ("org/q:Q4_K_M", 1)]
    (tmp_path / "models.yaml").write_text("models: [{name: a, source: org/a, adapters: {sql: org/s}}]")
    first, further, adapters = _models([], str(tmp_path / "models.yaml"))
    assert (first, [spec.name for spec in further]) == ("", ["a"])
    assert adapters == [DeclaredAdapter("sql", "a", "org/s")]
    with pytest.raises(ConfigurationError, match="'nothing' is not a model"):
        _models(["org/name", "nothing"], "")
    with pytest.raises(ConfigurationError, match="The model 'two' is declared twice"):
        _models(["org/name", str(tmp_path / "two"), str(tmp_path / "two")], "")
