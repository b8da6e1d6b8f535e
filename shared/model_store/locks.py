"""Locks of the models in a cache, which processes and hosts may share.

One file for each model, beside the models and never deleted: whoever fetches, converts or removes a model holds it
alone, whoever serves the model holds it together with others. A lock ends with the process that holds it. They are
files that are opened to be written, so that they hold on NFS too.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from shared.errors import ModelLoadError

LOCKS = ".locks"
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def lock_path(directory: Path) -> Path:
    """Of the model in `directory`."""
    return directory.parent / LOCKS / f"{directory.name}.lock"


def partial(directory: Path) -> Path:
    """Where the model of `directory` is made."""
    return directory.with_name(f".{directory.name}.partial")


@contextlib.contextmanager
def claimed(directory: Path, on_wait: Callable[[], None], *, keep: bool = False) -> Iterator[Path]:
    """Holds the model of `directory` alone, and makes a scratch directory for it; waits, after calling `on_wait`, while
    another process has it.

    What a process that was killed has left there is removed first, and what is left at the end too, unless
    `keep` says that it is of use next time. Raises `OSError`.
    """
    descriptor = _open(lock_path(directory))
    scratch = partial(directory)
    try:
        if not try_lock(descriptor):
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
        finally:
            if not keep:
                shutil.rmtree(scratch, ignore_errors=True)
            with contextlib.suppress(OSError):  # it has another name now, or something in it
                scratch.rmdir()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def idle(directory: Path) -> Iterator[bool]:
    """Whether nobody fetches or serves the model of `directory`; nobody can begin to while this is held."""
    descriptor = _open(lock_path(directory))
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


class ModelInUse:
    """A model that is not removed while this is held, at most until the process ends."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """May be called more than once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold_model(directory: Path, cache: Path) -> ModelInUse:
    """Keeps the model in `directory` from being removed from `cache`, and makes it the one that was used last.

    Raises `ModelLoadError` where it has just been removed: ask for it again. What lies elsewhere is never removed, nor
    what lies in a cache that cannot be written from here: there nothing is held.
    """
    descriptor: int | None = None
    if directory.parent.resolve() == cache.expanduser().resolve() and directory.is_dir():
        try:
            descriptor = _open(path := lock_path(directory))
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(path)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
    if not directory.is_dir():
        ModelInUse(descriptor).release()
        raise ModelLoadError(f"The model in {directory} has just been removed; ask for it again.")
    return ModelInUse(descriptor)


def last_use(directory: Path) -> float:
    """Unix seconds when the model of `directory` was last fetched or held."""
    for path in (lock_path(directory), directory):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def try_lock(descriptor: int) -> bool:
    """Whether the lock is ours alone by now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
