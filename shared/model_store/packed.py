"""Files of packed weights: which model each is of, and which nobody needs any more.

    NAME-DIGEST.packed     a rank's weights as its kernels lay them out
    NAME-DIGEST.model      a link to the directory of the model that they were made of
    NAME-DIGEST.partial    a file that is being written, locked by whoever writes it

A file is needed while its model is there. One without a link was made by an earlier version: its next reader writes it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.model_store.locks import try_lock
from shared.models import linked_gguf

ENDING = ".packed"
UNFINISHED = ".partial"
_LINK = ".model"


class PackedWeightsFile(msgspec.Struct, frozen=True):
    """A file, whole or not."""

    path: Path
    bytes: int
    used: float  # Unix seconds
    model: Path | None  # the directory of the model; None: not known
    needed: bool  # whether its model is there, or somebody writes it


def packed_files(directory: Path) -> list[PackedWeightsFile]:
    """All that lie in `directory`, by name."""
    found = []
    for path in sorted(directory.glob("*")):
        if path.suffix not in (ENDING, UNFINISHED) or path.is_symlink():
            continue
        with contextlib.suppress(OSError):  # somebody has removed it
            stat, model = path.stat(), _model_of(path)
            needed = _is_there(model) if path.suffix == ENDING else is_written(path)
            found.append(PackedWeightsFile(path, stat.st_size, stat.st_mtime, model, needed))
    return found


def note_model(path: Path, model: Path) -> None:
    """Says that the packed file at `path` is of the model in `model`. Raises `OSError`."""
    link = path.with_suffix(_LINK)
    if _model_of(path) != model.resolve():
        made = link.with_name(f".{link.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        made.symlink_to(model.resolve())
        made.replace(link)


def discard(path: Path) -> None:
    """Removes a file, and what is said of it. Whoever has it open goes on with it. Raises `OSError`."""
    path.unlink(missing_ok=True)
    if not path.with_suffix(ENDING).exists():
        path.with_suffix(_LINK).unlink(missing_ok=True)


def discard_of(model: Path, directory: Path) -> None:
    """Removes the files in `directory` that were made of the model that was in `model`. Raises `OSError`."""
    for file in packed_files(directory):
        if file.model == model.resolve():
            discard(file.path)


def is_written(path: Path) -> bool:
    """Whether somebody holds the file at `path`: for a moment, whoever asks does."""
    with _opened(path) as descriptor:
        return not try_lock(descriptor)


def discard_unwritten(path: Path) -> None:
    """As `discard`, of a file that nobody writes. Whoever begins to meanwhile finds that it has lost it. Raises
    `OSError`."""
    with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
        if try_lock(descriptor) and os.path.samestat(path.stat(), os.fstat(descriptor)):
            discard(path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _model_of(path: Path) -> Path | None:
    with contextlib.suppress(OSError):
        return path.with_suffix(_LINK).readlink()
    return None


def _is_there(model: Path | None) -> bool:
    return model is not None and (model / "config.json").is_file() and all(link.exists() for link in linked_gguf(model))
