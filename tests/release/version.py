"""The project's version: pyproject.toml has it, and other files repeat it where no tool can read it from there.

`python -m tests.release.version` prints it, `python -m tests.release.version 0.2.0` writes another one to all of them.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NUMBER = r"(\d+\.\d+\.\d+)"
_SOURCE = "pyproject.toml"
# By pattern of files: what stands before the version there. Clients have versions of their own.
_REPEATED = {
    "CITATION.cff": r"^version: ",
    "compose/.env": r"^VERSION=",
    "docs/engines.md": r"ryzanstein/executor-vllm:",
    "docs/kubernetes.md": r"newTag: ",
    "k8s/**/*.yaml": r"(?:image: ryzanstein/[a-z-]+:|newTag: )",
    "services/executor/engines/vllm/plugin/pyproject.toml": r'^version = "',
}


def version(root: Path = ROOT) -> str:
    found = re.search(rf'^version = "{_NUMBER}"', (root / _SOURCE).read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{root / _SOURCE} has no version of three numbers")
    return found[1]


def repeated(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Each place that repeats it, with what it says."""
    for path, before in _places(root):
        yield from ((path, number) for number in re.findall(before + _NUMBER, path.read_text(), re.MULTILINE))


def write(new: str, root: Path = ROOT) -> None:
    """Everywhere. Raises ValueError where it is not three numbers."""
    if not re.fullmatch(_NUMBER, new):
        raise ValueError(f"{new!r} is not a version of three numbers, such as 0.2.0")
    for path, before in (*_places(root), (root / _SOURCE, r'^version = "')):
        text = re.sub(rf"({before}){_NUMBER}", rf"\g<1>{new}", path.read_text(), flags=re.MULTILINE)
        path.write_text(text)


def _places(root: Path) -> list[tuple[Path, str]]:
    return [(path, before) for pattern, before in _REPEATED.items() for path in sorted(root.glob(pattern))]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    print(version())
