"""The tables of folders in docs/architecture.md, read from the packages' docstrings, and of docs/adr/README.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT


def table() -> str:
    rows = (f"| `{name}/` | {text} |" for name, text in folders())
    return "\n".join(["| folder | holds |", "| --- | --- |", *rows])


def folders() -> Iterator[tuple[str, str]]:
    """Packages of the product, two levels deep, with the first paragraph of their docstring."""
    for pattern in ("services/*/__init__.py", "shared/__init__.py"):
        for package in sorted(ROOT.glob(pattern)):
            yield _described(package)
            for inner in sorted(package.parent.glob("*/__init__.py")):
                yield _described(inner)


def _described(module: Path) -> tuple[str, str]:
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return module.parent.relative_to(ROOT).as_posix(), " ".join(text.partition("\n\n")[0].split())


def decisions() -> str:
    """Each decision by its number and title."""
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = (page.read_text().partition("\n")[0].partition(": ")[2] for page in pages)
    rows = (f"| [{page.name[:4]}]({page.name}) | {title} |" for page, title in zip(pages, titles, strict=True))
    return "\n".join(["| | decision |", "| --- | --- |", *rows])
