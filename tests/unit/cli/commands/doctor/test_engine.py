"""What `ryzanstein doctor` says of a vLLM in another environment, whose Python is a script here."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from services.cli.commands.doctor import command, engine
from services.cli.commands.doctor.check import Check
from services.executor.engines.vllm.plugin.ryzanstein_vllm import worker
from shared.models import link_gguf

GIGABYTE = 1_000_000_000


def python(tmp_path: Path, output: str, code: int = 0) -> Path:
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ncat <<'EOF'\nsomething else\n{output}\nEOF\necho ModuleNotFoundError >&2\nexit {code}\n"
    )
    program.chmod(0o755)
    return program


def found(version: str = "0.32.0", *free: int) -> str:
    said = {"version": version, "device": "cuda" if free else "cpu", "free": free, "known": ["LlamaForCausalLM"]}
    return json.dumps(said)


def model(tmp_path: Path, weights: int = 1000, **config: Any) -> Path:
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    return directory


def checked(tmp_path: Path, said: str, name: str = "", memory: int = GIGABYTE) -> dict[str, Check]:
    return {one.name: one for one in engine.checks(python(tmp_path, said), name, tmp_path, memory)}


def test_one_that_can(tmp_path: Path) -> None:
    checks = checked(tmp_path, found(), str(model(tmp_path)))
    assert {name: one.state for name, one in checks.items()} == {
        "vLLM": "ok",
        "model for vLLM": "ok",
        "memory for vLLM": "ok",
    }
    assert checks["vLLM"].found.startswith("0.32.0 on cpu")


@pytest.mark.parametrize(
    ("said", "state", "text"),
    [
        (found("0.9.2"), "error", "0.12 or newer"),
        (found("0.32.1rc1"), "ok", ""),
        (found("dev"), "ok", ""),
        (found().replace('"cpu"', '""'), "error", "whether the container is given GPUs"),
        ("{}", "error", "install it there"),
        ("", "error", "install it there"),
    ],
)
def test_versions_and_what_is_none(tmp_path: Path, said: str, state: str, text: str) -> None:
    check = checked(tmp_path, said)["vLLM"]
    assert check.state == state
    assert text in check.advice


def test_an_environment_without_it(tmp_path: Path) -> None:
    (check,) = engine.checks(python(tmp_path, "", 1), "m", tmp_path, 1)
    assert (check.state, check.found) == ("error", "ModuleNotFoundError")
    (check,) = engine.checks(tmp_path / "none", "", tmp_path, 1)
    assert check.found.endswith("none cannot be started (No such file or directory)")


def test_models_that_it_does_not_serve(tmp_path: Path) -> None:
    assert checked(tmp_path, found(), "org/none")["model for vLLM"].found == "org/none is not here"
    directory = model(tmp_path, architectures=["OtherForCausalLM"])
    check = checked(tmp_path, found(), str(directory))["model for vLLM"]
    assert (check.state, check.found) == ("warning", "OtherForCausalLM")
    (directory / "config.json").write_text("{")
    assert checked(tmp_path, found(), str(directory))["model for vLLM"].state == "error"


def test_a_gguf_file_is_converted_first(tmp_path: Path) -> None:
    directory = model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    link_gguf(directory, tmp_path / "m.gguf")
    for name in (directory, tmp_path / "m.gguf"):
        assert "models convert" in checked(tmp_path, found(), str(name))["model for vLLM"].advice


def test_the_oldest_version_is_the_workers() -> None:
    assert engine.OLDEST == worker.OLDEST


@pytest.mark.parametrize(
    ("weights", "free", "state", "text"),
    [
        (1000, (), "ok", ""),
        (2 * GIGABYTE, (), "error", "smaller"),
        (2 * GIGABYTE, (3 * GIGABYTE,), "ok", ""),
        (5 * GIGABYTE, (3 * GIGABYTE,), "error", "smaller"),
        (5 * GIGABYTE, (3 * GIGABYTE, 3 * GIGABYTE), "note", "--tensor-parallel-size 2"),
        (0, (), "warning", "again"),
    ],
)
def test_memory(tmp_path: Path, weights: int, free: tuple[int, ...], state: str, text: str) -> None:
    check = checked(tmp_path, found("0.32.0", *free), str(model(tmp_path, weights)))["memory for vLLM"]
    assert check.state == state
    assert text in check.advice


def test_a_model_needs_an_engine() -> None:
    app = typer.Typer()
    command.add_to(app)
    result = CliRunner().invoke(app, ["doctor", "--model", "m"])
    assert result.exit_code == 2
    assert "--engine-python" in result.output
