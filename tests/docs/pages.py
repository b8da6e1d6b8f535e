"""The pages for people as data: README, CONTRIBUTING and docs/, and what they name."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "shared", "tests", "benchmarks", "k8s")
_NOT_OURS = {"node_modules", "target", "build", "dist", "wheels", "__pycache__"}
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"`([\w*][\w./*-]*)`")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)")
_MODULE = re.compile(r"python3? -m ([\w.]+)")


def pages() -> list[Path]:
    return sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def prose(text: str) -> Iterator[str]:
    """Lines that are neither code, nor of a table, nor a comment."""
    for line in _COMMENT.sub("", _FENCED.sub("", text)).splitlines():
        if not line.startswith("|"):
            yield line


def paths_named(text: str) -> Iterator[str]:
    """Files of ours and folders, as inline code has them: whole, or the end of a path."""
    for name in _SPAN.findall(_FENCED.sub("", text)):
        if name.endswith((".py", ".c", ".h", ".proto", "/")) or name.partition("/")[0] in PACKAGES:
            yield name


def modules_named(text: str) -> Iterator[str]:
    """Of ours, that a reader is told to run."""
    for name in _MODULE.findall(text):
        if name.partition(".")[0] in PACKAGES:
            yield name.rstrip(".")


def links(text: str) -> Iterator[str]:
    """Files of ours that it links to, without anchors."""
    for target in _LINK.findall(_FENCED.sub("", text)):
        if target and "://" not in target and not target.startswith("mailto:"):
            yield target


def all_paths() -> list[str]:
    """Of files, and of folders with a slash at the end, each with a slash before it."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in _NOT_OURS and not name.startswith(".")]
        base = "/" + Path(folder).relative_to(ROOT).as_posix().removeprefix(".")
        base = base.rstrip("/")
        found += [f"{base}/{name}/" for name in folders] + [f"{base}/{name}" for name in files]
    return found
