"""Packed weights on disk, one file per model, rank and way to compute it, which a later start of the rank reads.

    start ──identity──▶ found ──▶ read (every byte is checked) ──▶ serve, with no modelling code imported
                    └──▶ not there, of other files, damaged ──▶ build ──▶ serve ──▶ keep, in the background

A file is only trusted where it belongs to the user who runs the rank and nobody else may write to it. It is written
under another name and renamed when it is on the disk, so what is there is whole. Files that were not used for the
longest time make room for new ones.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import structlog

from services.executor.core.settings import packed_name
from services.executor.cpu.packed_file import Damaged, PackedFile, Progress, write
from services.executor.cpu.packed_linear import has_short_exponents
from services.executor.cpu.packed_model import PackedModel
from services.executor.cpu.weight_streaming import WeightStreamer
from services.executor.model.model_facts import ModelFacts
from services.executor.native.library import library_file, load_library
from shared.model_store import packed

log = structlog.get_logger(__name__)

_CLAIMS, _PAUSE = 50, 0.01  # how often a file to write is asked for, and seconds between
_SAMPLE = 1 << 16  # bytes of the end of each large file that are looked at
_SMALL = 1 << 26  # bytes up to which a file of JSON is read whole
# The packages and files that decide what is in a file of packed weights.
_CODE = ("cpu", "model", "native", "core/sharding.py")
_NICENESS = 10  # of the thread that writes: about a tenth of a core beside others that are busy


class CachedWeights(NamedTuple):
    """What a file holds."""

    facts: ModelFacts
    model: PackedModel
    streamer: WeightStreamer | None = None  # of what is not in memory; None: all is


class WeightCache:
    """The file of one rank of one model."""

    def __init__(self, directory: Path, limit: int, model: Path, share: Iterable[object]) -> None:
        """`directory`: of all files, which take `limit` bytes together. `share`: what sets this rank's weights apart
        from those that others make of the same files."""
        self._directory = directory
        self._limit = limit
        share = [*share]
        self._model = model
        self._name = packed_name(model, share)
        self._identity = _digest(repr(share), _of_files(model), *_of_code(), repr(_keeps_short_exponents()))

    def find(self) -> PackedFile | None:
        """The file, where there is one of this model as it is now; to be closed."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("weight_cache_read_failed", file=str(self._path), reason=error.strerror)
            return None
        if not _is_ours(os.fstat(fd)):
            os.close(fd)
            log.warning("weight_cache_read_failed", file=str(self._path), reason="others may write to it")
            return None
        try:
            found = PackedFile(fd)
        except (Damaged, OSError) as error:
            self._discard(error)
            return None
        if found.identity != self._identity:
            found.close()
            return None
        with contextlib.suppress(OSError):  # the directory may be read-only here
            packed.note_model(self._path, self._model)
        return found

    def read(self, found: PackedFile, threads: int, progress: Progress) -> CachedWeights | None:
        """What `found` holds, with `threads` threads; closes it. None where it is damaged: it is gone then."""
        return self._taken(found, lambda: (found.read(threads, progress), None))

    def stream(self, found: PackedFile, threads: int, budget: int, progress: Progress) -> CachedWeights | None:
        """As `read`, within `budget` bytes of memory: the other weights are read as steps need them. Raises
        `ConfigurationError` where it is too small."""
        return self._taken(found, lambda: found.streamed(threads, budget, progress))

    def map(self, found: PackedFile, threads: int) -> CachedWeights | None:
        """As `read`, over the file's own pages."""
        return self._taken(found, lambda: (found.mapped(threads), None))

    def _taken(
        self, found: PackedFile, take: Callable[[], tuple[PackedModel, WeightStreamer | None]]
    ) -> CachedWeights | None:
        try:
            model, streamer = take()
            with contextlib.suppress(OSError):
                os.utime(self._path)  # it was used
            return CachedWeights(found.facts, model, streamer)
        except (Damaged, OSError) as error:
            self._discard(error)
            return None
        finally:
            found.close()

    def keep_later(self, facts: ModelFacts, model: PackedModel) -> threading.Thread:
        """Writes `model` in a thread that gives way to all others; a rank that ends meanwhile leaves nothing that
        would be read."""

        def work() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self.keep(facts, model)

        thread = threading.Thread(target=work, name="keep weights", daemon=True)
        thread.start()
        return thread

    def keep(self, facts: ModelFacts, model: PackedModel) -> None:
        """Writes `model` to the file, unless another process is at it. What goes wrong is told in the log: the ring
        serves without."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _claimed(self._path.with_suffix(packed.UNFINISHED)) as (fd, partial):
                if fd is None:
                    return
                size = _size_of(model)
                if reason := self._make_room(size):
                    log.info("weight_cache_write_failed", reason=reason, bytes=size)
                    partial.unlink(missing_ok=True)
                    return
                os.ftruncate(fd, 0)
                write(fd, self._identity, facts, model)
                os.fsync(fd)
                partial.rename(self._path)
                packed.note_model(self._path, self._model)
            log.info("weights_kept", file=str(self._path), bytes=size)
        except OSError as error:
            log.warning(
                "weight_cache_write_failed", reason=error.strerror or str(error), directory=str(self._directory)
            )

    @property
    def _path(self) -> Path:
        return self._directory / self._name

    def _discard(self, reason: Exception) -> None:
        log.warning("weight_cache_damaged", file=str(self._path), reason=str(reason))
        with contextlib.suppress(OSError):
            packed.discard(self._path)

    def _make_room(self, size: int) -> str:
        """Deletes what nobody needs, and then what was not used for the longest time, until `size` more bytes fit; why
        they cannot, or nothing."""
        if size > self._limit:
            return f"they take {size} bytes, more than RYZANSTEIN_WEIGHT_CACHE_BYTES ({self._limit})"
        for rest in self._others(packed.UNFINISHED):
            if not rest.needed:  # a rank was killed while it wrote
                packed.discard_unwritten(rest.path)
        files = sorted(self._others(packed.ENDING), key=lambda file: (file.needed, file.used))
        total = sum(file.bytes for file in [*files, *self._others(packed.UNFINISHED)]) + size
        for file in files:
            if total <= self._limit:
                break
            packed.discard(file.path)
            total -= file.bytes
        free = shutil.disk_usage(self._directory).free
        return "" if free >= 2 * size else f"the disk has {free} bytes left, which is less than twice as many"

    def _others(self, ending: str) -> list[packed.PackedWeightsFile]:
        files = packed.packed_files(self._directory)
        return [file for file in files if file.path.suffix == ending and file.path.stem != self._path.stem]


def _size_of(model: PackedModel) -> int:
    linears = {id(model.head): model.head, id(model.embedding): model.embedding}
    if model.inputs is not None:
        linears |= {id(linear): linear for linear in (model.inputs.table, model.inputs.projection)}
    for layer in model.layers:
        linears |= {id(linear): linear for linear in layer.linears}
    return sum(linear.nbytes for linear in linears.values())


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[tuple[int | None, Path]]:
    """(`path` open for writing, and nobody else's for as long, itself); None for the first while it is another's."""
    for _ in range(_CLAIMS):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # by who writes it, or by who looks for a moment whether anybody does
                time.sleep(_PAUSE)
                continue
            if not os.fstat(fd).st_nlink:  # somebody has taken it for one that was left behind
                continue
            # Whoever had it before may have renamed it: then it is a finished file by now.
            still = path.exists() and os.path.samestat(path.stat(), os.fstat(fd))
            yield (fd if still and _is_ours(os.fstat(fd)) else None), path
            return
        finally:
            os.close(fd)
    yield None, path


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _of_files(model: Path) -> str:
    """Of all files in `model`: names, sizes, times; what JSON says; a sample of the weights."""
    parts: list[object] = []
    for path in sorted(model.iterdir()):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            continue
        parts += [path.name, found.st_size, found.st_mtime_ns]
        with path.open("rb") as file:
            if path.suffix != ".json" or found.st_size > _SMALL:
                file.seek(max(0, found.st_size - _SAMPLE))
            parts.append(hashlib.sha256(file.read()).hexdigest())
    return repr(parts)


def sources() -> list[Path]:
    """Our own code that decides it."""
    places = (Path(__file__).parents[1] / name for name in _CODE)
    return [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]


@cache
def _of_code() -> tuple[str, ...]:
    """Of all that decides how weights are packed: our code, the kernels, and the libraries whose models they are."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()
    library = library_file()
    kernels = repr((library.stat().st_size, library.stat().st_mtime_ns) if library else None)
    return digest, kernels, *map(_version, ("torch", "transformers"))


def _keeps_short_exponents() -> bool:
    """Of the level that is computed at."""
    library = load_library()
    return library is not None and has_short_exponents(library)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
