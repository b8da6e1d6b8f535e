"""Dumps that are written without being asked for: the last few, in one directory."""

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path

import msgspec

from shared.messages.debugging import Dump

_NAME = re.compile(r"dump-[\w=-]+-\d{8}T\d{6}-\d{3}\.json")
_UNSAFE = re.compile(r"[^\w=-]")


def default_directory() -> Path:
    """In the directory for temporary files, for this user alone."""
    return Path(tempfile.gettempdir()) / f"ryzanstein-dumps-{os.getuid()}"


def write_dump(directory: Path, dump: Dump, keep: int) -> Path:
    """Writes it and removes the oldest beyond `keep`. Returns its path. Raises OSError.

    The files are for their owner alone: settings and names of requests are in them.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user", str(directory))
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(dump.taken_at))
    thousandths = int(dump.taken_at % 1 * 1000)
    path = directory / f"dump-{_UNSAFE.sub('_', dump.group)}-{moment}-{thousandths:03}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(dump)))
    _remove_old(directory, keep)
    return path


def _remove_old(directory: Path, keep: int) -> None:
    ours = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    for path in sorted(ours, key=lambda one: one.name[-24:])[: max(0, len(ours) - keep)]:
        with contextlib.suppress(OSError):
            path.unlink()
