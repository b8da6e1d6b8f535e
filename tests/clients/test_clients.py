"""Clients that nobody here wrote, each a program of its own against a stack on the stub engine.

They are heavy, and what they need does not fit the versions in constraints.txt: they live in environments of their own.

    RYZANSTEIN_CLIENTS_PYTHON  interpreters that have langchain-openai, litellm or instructor (the extra `clients`),
                               with colons between them
    RYZANSTEIN_CLIENTS_NODE    a directory in which `npm install openai` was run

A test whose client is nowhere is skipped, and says so.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
MODEL = "stub"
EMBEDDINGS = [32, 32]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("clients"), "--engine", "stub", "--no-proof") as running:
        yield running


def python_with(package: str) -> str:
    """An interpreter that has `package`; skips the test where none has."""
    for python in filter(None, os.environ.get("RYZANSTEIN_CLIENTS_PYTHON", "").split(":")):
        asked = [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec('{package}') is None)"]
        if subprocess.run(asked, check=False, capture_output=True).returncode == 0:
            return python
    pytest.skip(f"NOT JUDGED BY {package}: no interpreter in RYZANSTEIN_CLIENTS_PYTHON has it")


def run(*command: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_langchain(stack: Stack) -> None:
    seen = run(python_with("langchain_openai"), str(HERE / "use_langchain.py"), stack.url, MODEL)
    text, tokens = seen["whole"]
    assert tokens == len(text) == 8
    assert seen["streamed"] == text
    assert len(seen["completion"]) == 4
    assert seen["embeddings"] == EMBEDDINGS


def test_litellm(stack: Stack) -> None:
    seen = run(python_with("litellm"), str(HERE / "use_litellm.py"), stack.url, MODEL)
    text, tokens = seen["whole"]
    assert tokens == len(text) == 8
    assert seen["streamed"] == text
    assert seen["embeddings"] == EMBEDDINGS


def test_instructor(stack: Stack) -> None:
    """The stub follows the schema: what it says is of the right types, and of no meaning."""
    seen = run(python_with("instructor"), str(HERE / "use_instructor.py"), stack.url, MODEL)
    assert {name: type(value) for name, value in seen["user"].items()} == {"name": str, "age": int}


def test_openai_npm(stack: Stack) -> None:
    modules = os.environ.get("RYZANSTEIN_CLIENTS_NODE", "")
    node = shutil.which("node")
    if node is None or not (Path(modules) / "node_modules" / "openai").is_dir() or not modules:
        pytest.skip(
            "NOT JUDGED BY the openai npm package: RYZANSTEIN_CLIENTS_NODE names no directory that has it"
        )
    seen = run(node, str(HERE / "use_openai_npm.mjs"), stack.url, MODEL, modules)
    text, finish, tokens = seen["whole"]
    assert (len(text), finish, tokens) == (8, "length", 8)
    assert seen["streamed"] == [text, 8]
    assert seen["completion"].startswith("Hi")
    assert len(seen["completion"]) == 6
    assert seen["embeddings"] == EMBEDDINGS
    assert seen["models"] == [MODEL]
    assert seen["refused"] == [True, "unsupported_parameter", "suffix"]
