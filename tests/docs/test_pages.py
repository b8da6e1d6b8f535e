"""What the pages name is there, and prose is wrapped."""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_paths, links, modules_named, pages, paths_named, prose

WIDTH = 120
GENERATED = {"openai-parameters.md"}  # by a command that wraps nothing

MADE = {"build/sbom/", "dist/", "wheels/"}  # by commands on the pages
PATHS = all_paths()


def exists(name: str) -> bool:
    pattern = f"*/{name}" if "." in name or name.endswith("/") else f"*/{name}*"
    return name in MADE or any(fnmatch.fnmatchcase(path, pattern) for path in PATHS)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_it_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert [name for name in paths_named(text) if not exists(name)] == []
    modules = set(modules_named(text))
    files = {module: ROOT / module.replace(".", "/") for module in modules}
    assert [
        module
        for module, path in files.items()
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file()
    ] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Anchors are MkDocs' to check, in `make lint`."""
    assert [target for target in links(page.read_text()) if not (page.parent / target).exists()] == []


def test_files_that_the_code_names_are_there() -> None:
    code = [path for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in code
        for name in paths_named(path.read_text())
        if name.endswith((".py", ".c", ".h")) and not exists(name)
    ]
    assert missing == []


def test_prose_is_wrapped() -> None:
    long = [
        f"{page.relative_to(ROOT)}: {line[:60]}..."
        for page in pages()
        if page.name not in GENERATED
        for line in prose(page.read_text())
        if len(line) > WIDTH and not re.fullmatch(r"`[^`]+`\S*", line)
    ]
    assert long == []


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_a_path_that_is_not_there_is_found() -> None:
    text = "See `services/gateway/nowhere.py`, `nowhere.c` and `python -m benchmarks.nowhere`."
    assert [name for name in paths_named(text) if not exists(name)] == ["services/gateway/nowhere.py", "nowhere.c"]
    assert list(modules_named(text)) == ["benchmarks.nowhere"]
