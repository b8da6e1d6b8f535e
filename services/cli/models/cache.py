"""Directories of the model cache: one process at a time works in one, until what it makes there is whole."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def claimed(path: Path, on_wait: Callable[[], None], *, keep: bool = False) -> Iterator[Path]:
    """Makes the directory `path` and holds it; waits, after calling `on_wait`, while another process has it.

    What a process that was killed has left there is removed first, and what is left at the end too, unless
    `keep` says that it is of use next time. Raises `OSError`.
    """
    descriptor = _claim(path, on_wait)
    try:
        if not keep:
            _empty(path)
        yield path
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # it has another name now, or something in it
            path.rmdir()
        os.close(descriptor)


def _claim(path: Path, on_wait: Callable[[], None]) -> int:
    """The lock lies on the directory itself, so it is worth something only while that has its name."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # its holder has finished just now
                continue
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_named(descriptor, path):
                undo.pop_all()
                return descriptor


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def size_of(directory: Path) -> int:
    """Bytes of all files under `directory`; those that vanish meanwhile count not."""
    size = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += file.stat().st_size if file.is_file() else 0
    return size
