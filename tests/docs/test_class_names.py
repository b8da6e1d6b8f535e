"""A public class has a name that no other has, so that a search for it finds one thing."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_public_class_has_another_s_name() -> None:
    places = defaultdict(list)
    for part in ("services", "shared"):
        for file in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
