"""The product's sources, parsed where a text stands in them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT


def nodes(text: str, *folders: str) -> Iterator[tuple[Path, ast.AST]]:
    """All nodes of the files below `folders`, in the order of their paths, that have `text` in them."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        if text in source.lower():
            yield from ((path, node) for node in ast.walk(ast.parse(source)))


def module_of(path: Path) -> str:
    """The module whose source lies there."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
