"""How much lies in a directory."""

import contextlib
from pathlib import Path


def size_of(directory: Path) -> int:
    """Bytes of all files under `directory`; those that vanish meanwhile count not."""
    size = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += file.stat().st_size if file.is_file() else 0
    return size


def megabytes(count: int) -> str:
    """Such as "270 MB"; from ten thousand on in GB."""
    return f"{count / 1e6:,.0f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"
