"""Files of LoRA adapters on a host's disk: bounded, the least recently used deleted first, shared by all rings there.

    <root>/ab12.../adapter_config.json, adapter_model.safetensors     whole: put there by a rename
    <root>/ab12....lock        locked shared by each ring that uses it, exclusively by whoever deletes it
    <root>/.part-...           being fetched

What a ring holds stays as it is, whatever another one on the host needs room for; locks end with their process.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared.errors import StorageFull
from shared.messages.registry import is_digest

_ABANDONED = 3600.0  # seconds after which nobody writes to a directory any more


class _Entry(NamedTuple):
    digest: str
    bytes: int
    used: float


class AdapterCache:
    """Methods are for one thread at a time, and raise `OSError`."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._locks: dict[str, int] = {}

    @property
    def in_use(self) -> set[str]:
        """Digests of what this ring uses."""
        return set(self._locks)

    def hold(self, digest: str) -> Path | None:
        """Where an adapter's files are, which stay until `release`; None: not on this disk."""
        if digest in self._locks:
            return self._root / digest
        if not (self._root / digest).is_dir():
            return None
        lock = self._locked(digest, fcntl.LOCK_SH)
        if lock is None or not (self._root / digest).is_dir():  # it was being deleted
            if lock is not None:
                os.close(lock)
            return None
        self._locks[digest] = lock
        os.utime(self._root / digest)
        return self._root / digest

    def release(self, digest: str) -> None:
        """This ring needs the files no more."""
        if (lock := self._locks.pop(digest, None)) is not None:
            os.close(lock)

    def has(self, digest: str) -> bool:
        return (self._root / digest).is_dir()

    def room(self) -> int:
        """Bytes that could be added without deleting anything."""
        return self._max_bytes - sum(entry.bytes for entry in self._entries())

    def begin(self, size: int) -> Path:
        """A new directory for an adapter of `size` bytes. Deletes the least recently used ones that no ring on the host
        holds. Raises `StorageFull` where that is not enough."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(size)
        part = self._root / f".part-{secrets.token_hex(8)}"
        part.mkdir(mode=0o700)
        return part

    def add(self, digest: str, part: Path) -> None:
        """`part`, from `begin`, has all of an adapter's files."""
        with contextlib.suppress(OSError):  # another ring was first
            part.rename(self._root / digest)
        self.drop(part)

    def drop(self, part: Path) -> None:
        """Nothing comes of it."""
        shutil.rmtree(part, ignore_errors=True)

    def close(self) -> None:
        for digest in list(self._locks):
            self.release(digest)

    def _make_room(self, size: int) -> None:
        now, entries = time.time(), sorted(self._entries(), key=lambda entry: entry.used)
        for part in self._root.glob(".part-*"):
            with contextlib.suppress(OSError):
                if now - part.stat().st_mtime > _ABANDONED:
                    self.drop(part)
        total = size + sum(entry.bytes for entry in entries)
        for entry in entries:
            if total <= self._max_bytes:
                break
            if self._delete(entry.digest):
                total -= entry.bytes
        if total > self._max_bytes:
            raise StorageFull(
                f"The adapter's {size:,} bytes do not fit the {self._max_bytes:,} of --adapter-cache-bytes beside the "
                "adapters that are in use; raise it."
            )

    def _delete(self, digest: str) -> bool:
        """False where some ring holds it."""
        if digest in self._locks:
            return False
        lock = self._locked(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            return False
        try:
            shutil.rmtree(self._root / digest, ignore_errors=True)
            self._lock_file(digest).unlink(missing_ok=True)
        finally:
            os.close(lock)
        return not (self._root / digest).exists()

    def _entries(self) -> Iterator[_Entry]:
        for path in self._root.glob("*"):
            if is_digest(path.name):
                with contextlib.suppress(OSError):  # another ring has deleted it
                    size = sum(file.stat().st_size for file in path.iterdir())
                    yield _Entry(path.name, size, path.stat().st_mtime)

    def _lock_file(self, digest: str) -> Path:
        return self._root / f"{digest}.lock"

    def _locked(self, digest: str, how: int) -> int | None:
        """The lock file, locked; None where that would have to wait, or somebody has just deleted it."""
        path = self._lock_file(digest)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
                return lock
        except OSError:
            pass
        os.close(lock)
        return None
