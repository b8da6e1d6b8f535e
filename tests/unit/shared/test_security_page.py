"""docs/security.md names the test that holds each claim of its threat model."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]

NAMED = re.compile(r"`((?:unit|integration)/[\w/]+\.py)::(\w+)`")


def test_every_test_that_is_named_is_there() -> None:
    named = NAMED.findall((ROOT / "docs/security.md").read_text())
    assert len(named) > 20
    for path, name in named:
        module = ast.parse((ROOT / "tests" / path).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in module.body if isinstance(node, functions)}, f"{path}::{name}"
