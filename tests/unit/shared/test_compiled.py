"""Modules that wheels have compiled: where they are, and what may not be in them."""

import ast
import importlib
import os
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ryzanstein"]["compiled"]
# Of what is imported: `make test-compiled` runs the first, and a tree has nothing that would hide a source.
SUFFIX = ".so" if os.environ.get("RYZANSTEIN_COMPILE") == "1" else ".py"


@pytest.mark.parametrize("name", COMPILED)
def test_a_module_is_the_one_that_was_asked_for(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)
    assert module.__file__.endswith(SUFFIX)


@pytest.mark.parametrize("name", COMPILED)
def test_messages_are_not_compiled(name: str) -> None:
    """Of the types of a compiled class's fields `list` or `tuple` is left: msgspec would no longer check them."""
    classes = [node for node in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    assert not {base for base in bases if "Struct" in base}
