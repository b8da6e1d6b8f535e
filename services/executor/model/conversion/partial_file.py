"""A file of tensors that appears whole or not at all, and goes on where it was when its writer was killed.

    .NAME.partial/<digest>/     beside the target; the digest stands for source, options and header
      the header, and tensor after tensor, each on the disk before the next one begins

Whole tensors of an earlier run are kept; the one that it died in is written again. What another conversion to the same
target left there is removed.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigurationError
from shared.models import gguf_parts

Progress = Callable[[str, int, int], None]  # called with (what is being done, bytes done, bytes in all)

Piece = NDArray[np.generic]


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of the file."""

    name: str
    nbytes: int
    pieces: Callable[[], Iterator[Piece]]  # its bytes, a few rows at a time


def digest_of(source: Path, header: bytes, options: str) -> str:
    """Stands for what is written: the same for another run of the same conversion alone."""
    digest = hashlib.sha256(options.encode() + b"\0" + header)
    files = sorted(source.iterdir()) if source.is_dir() else gguf_parts(source)
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def partial_directory(target: Path, digest: str) -> Iterator[Path]:
    """The directory in which `target` is made, held for this process. It stays when the block fails.

    Raises `ConfigurationError` where another process is at it, or has finished just now.
    """
    path = target.with_name(f".{target.name}.partial")
    descriptor = _held(path, target)
    try:
        check_free(target)
        for other in path.iterdir():
            if other.name != digest:
                shutil.rmtree(other, ignore_errors=True)
        (path / digest).mkdir(exist_ok=True)
        yield path / digest
        shutil.rmtree(path, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):  # there is something in it, for the next run
            path.rmdir()
        os.close(descriptor)


def _held(path: Path, target: Path) -> int:
    """A lock on the directory `path`, which a process that dies gives back; it counts while that has its name."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # who held it has finished just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigurationError(
                f"Another process is making {target} already; wait for it, or give another target."
            ) from None
        except FileNotFoundError:
            pass
        os.close(descriptor)


def check_free(target: Path) -> None:
    """Raises `ConfigurationError` where there is something already."""
    if target.exists():
        raise ConfigurationError(f"{target} exists already; remove it, or give another target.")


def check_room(directory: Path, needed: int, kept: int) -> None:
    """Raises `ConfigurationError` where `directory` has no room for `needed` bytes, `kept` of which are there."""
    free = shutil.disk_usage(directory).free
    if free < needed - kept:
        raise ConfigurationError(
            f"The conversion needs {needed - kept:,} bytes in {directory}, which has {free:,} free; make room, or "
            "give a target on another disk."
        )


def size_of_file(header: bytes, tensors: Sequence[WrittenTensor], alignment: int) -> int:
    return len(header) + sum(_padded(tensor.nbytes, alignment) for tensor in tensors)


def write_tensors(
    path: Path, header: bytes, tensors: Sequence[WrittenTensor], alignment: int, progress: Progress
) -> None:
    """Writes or completes `path`; each tensor is padded to a multiple of `alignment` bytes. Raises `OSError`."""
    total = size_of_file(header, tensors, alignment)
    with path.open("a+b") as file:
        first, done = _whole(file.seek(0, os.SEEK_END), header, tensors, alignment)
        file.truncate(done)
        if not done:
            file.write(header)
            done = len(header)
        for tensor in tensors[first:]:
            progress("writing", done, total)
            written = 0
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).tobytes())
                written += piece.nbytes
                progress("writing", done + written, total)
            assert written == tensor.nbytes, f"{tensor.name}: {written} bytes where {tensor.nbytes} are announced"
            file.write(bytes(_padded(written, alignment) - written))
            done += _padded(written, alignment)
            file.flush()
            os.fdatasync(file.fileno())
    progress("writing", total, total)


def _whole(size: int, header: bytes, tensors: Sequence[WrittenTensor], alignment: int) -> tuple[int, int]:
    """(number of tensors, bytes) that are whole in a file of `size` bytes."""
    done = len(header)
    if size < done:
        return 0, 0
    for number, tensor in enumerate(tensors):
        if done + _padded(tensor.nbytes, alignment) > size:
            return number, done
        done += _padded(tensor.nbytes, alignment)
    return len(tensors), done


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
