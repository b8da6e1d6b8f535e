"""Room in the model cache: what lies there, what a download may take, and what is removed for it.

A model is removed when nobody holds it (`locks.hold_model`), nothing of the registry names it, and it is the one that
was used longest ago. What is on its way counts with all that it will take, so that two downloads at once do not share
one room.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store.locks import LOCKS, idle, last_use, partial
from shared.model_store.packed import discard, discard_of, packed_files
from shared.model_store.repository import MANIFEST, PARTS, Manifest, directory_name
from shared.model_store.settings import Store
from shared.models import converted_name, linked_gguf

Named = Collection[tuple[str, str]]  # (source, revision) of models that the registry names

ADAPTERS = ".hub-adapters"  # in the cache: adapters of the hub
RESERVE = 256 << 20  # bytes of the disk that downloads leave free
_RESERVED = "reserved"
_PARTIAL = ".partial"
_REMOVED = ".removed"
_STALE = 86_400.0  # seconds after which a download that nobody goes on with is garbage
_LISTED = 5


class CacheEntry(msgspec.Struct, frozen=True):
    """A model, an adapter, or an unfinished download in the cache."""

    directory: Path  # of the model, also where it is unfinished
    bytes: int  # on the disk
    promised: int  # that a download under way still brings
    used: float  # Unix seconds
    removable: bool
    unfinished: bool = False
    packed: bool = False  # it is a file of packed weights, and `directory` its path

    @property
    def name(self) -> str:
        return self.directory.name.replace("--", "/")


def choose_removals(entries: Sequence[CacheEntry], excess: int) -> list[CacheEntry]:
    """What is removed so that `excess` bytes come free, least recently used first; all that can go where that is not
    enough. Pure."""
    chosen: list[CacheEntry] = []
    for entry in sorted((entry for entry in entries if entry.removable), key=lambda entry: entry.used):
        if sum(one.bytes for one in chosen) >= excess:
            break
        chosen.append(entry)
    return chosen


def excess_of(entries: Sequence[CacheEntry], needed: int, limit: int, free: int) -> int:
    """Bytes that must go before `needed` may come into a cache of `limit` (0: none) on a disk with `free`; 0 or less:
    there is room. Pure."""
    promised = sum(entry.promised for entry in entries)
    of_disk = needed + promised + RESERVE - free if needed else 0
    held = sum(entry.bytes for entry in entries)
    return max(of_disk, held + promised + needed - limit if limit else of_disk)


def entries_of(cache: Path, named: Named) -> list[CacheEntry]:
    """Everything in the cache; what the registry names, or somebody holds, is not removable."""
    kept = _kept(named)
    found = []
    for directory in _directories(cache):
        unfinished = directory.name.endswith(_PARTIAL)
        model = directory.with_name(directory.name[1 : -len(_PARTIAL)]) if unfinished else directory
        with idle(model) as is_idle:
            size = bytes_of(directory)
            promised = 0 if is_idle or not unfinished else max(0, _reserved(directory) - size)
            ours = unfinished or (directory / MANIFEST).is_file()  # what was put there by hand is not
            removable = is_idle and ours and model.name.lower() not in kept
            used = directory.stat().st_mtime if unfinished else last_use(model)
        found.append(CacheEntry(model, size, promised, used, removable, unfinished))
    return found


def unfinished_downloads(cache: Path) -> list[tuple[Path, int]]:
    """Where they lie, and their bytes; also while somebody goes on with them."""
    found = _directories(cache)
    return [(place, bytes_of(place)) for place in found if place.name.endswith(_PARTIAL)]


def make_room(store: Store, directory: Path, needed: int, named: Named | None) -> None:
    """Sees to room for `needed` more bytes of the model in `directory`, which the caller has claimed: models are
    removed for it where `store.cache_bytes` bounds the cache, and it is known what the registry names.

    Raises `ConfigurationError` where there is none, with what could go.
    """
    if not needed:
        return
    with _measuring(store.cache):
        entries = [entry for entry in entries_of(store.cache, named or ()) if entry.directory != directory]
        own = bytes_of(partial(directory))
        whole = [*entries, CacheEntry(directory, own, 0, 0.0, removable=False)]
        excess = excess_of(whole, needed, store.cache_bytes, shutil.disk_usage(store.cache).free)
        removals = choose_removals(entries, excess) if excess > 0 else []
        if excess > sum(entry.bytes for entry in removals) or (
            removals and not (store.cache_bytes and named is not None)
        ):
            raise ConfigurationError(_no_room(store, directory, needed, whole, removals))
        for entry in removals:
            remove(entry.directory, unfinished=entry.unfinished)
        (partial(directory) / PARTS).mkdir(exist_ok=True)
        (partial(directory) / PARTS / _RESERVED).write_text(str(own + needed), encoding="ascii")


def collect(store: Store, named: Named, target: int | None, *, dry_run: bool) -> list[CacheEntry]:
    """Removes what is no longer of use, and says what: what removals and downloads have left behind, models whose GGUF
    file is gone, then least recently used models until the cache holds at most `target` bytes (None: what the settings
    allow), and the packed weights of models that are not there any more. With `dry_run` it is only said."""
    limit = store.cache_bytes if target is None else max(target, 1)
    with _measuring(store.cache):
        for rest in store.cache.glob(f".*{_REMOVED}"):
            shutil.rmtree(rest, ignore_errors=True)
        entries = entries_of(store.cache, named)
        now = time.time()
        stale = [one for one in entries if one.unfinished and one.removable and one.used < now - _STALE]
        lost = [one for one in entries if one.removable and _is_lost(one)]
        left = [one for one in entries if one not in stale and one not in lost]
        excess = sum(one.bytes for one in left) - limit if limit else 0
        removed = [*stale, *lost, *(choose_removals(left, excess) if excess > 0 else [])]
        gone = [one for one in removed if dry_run or remove(one.directory, unfinished=one.unfinished)]
        models = {one.directory.resolve() for one in gone if not one.unfinished}
        idle_files = [one for one in packed_files(store.packed) if not one.needed or one.model in models]
        for file in () if dry_run else idle_files:
            discard(file.path)
        packed = (CacheEntry(one.path, one.bytes, 0, one.used, removable=True, packed=True) for one in idle_files)
        return [*gone, *packed]


def _is_lost(entry: CacheEntry) -> bool:
    """Whether the GGUF file that the model is served from is gone."""
    return not entry.unfinished and any(not link.exists() for link in linked_gguf(entry.directory))


def remove(directory: Path, *, unfinished: bool = False) -> bool:
    """Deletes the model in `directory`, at once and as a whole; False where somebody holds it or it is not there."""
    place = partial(directory) if unfinished else directory
    gone = directory.with_name(f".{directory.name}.{os.getpid()}{_REMOVED}")
    with idle(directory) as is_idle:
        if not is_idle or not place.is_dir():
            return False
        place.rename(gone)
    shutil.rmtree(gone)
    return True


def remove_model(name: str, revision: str, store: Store) -> bool:
    """Deletes a model of the hub from the cache; False where there is none. Raises `ModelLoadError` where it is
    served."""
    directory = store.cache / directory_name(name, revision)
    if remove(directory):
        discard_of(directory, store.packed)
        return True
    if directory.is_dir():
        raise ModelLoadError(f"The model {name} in {directory} is in use; unload it first.")
    return remove(directory, unfinished=True)


@contextlib.contextmanager
def removing(cache: Path) -> Iterator[None]:
    """Something of the cache is removed within. Raises `ModelLoadError` where its file system forbids that."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"Nothing can be removed from the model cache {cache} ({error.strerror or error}); give permission there, "
            "or remove it on the machine that may write there."
        ) from None


def mark_made(directory: Path, name: str) -> None:
    """The model in `directory` was made here, and may be removed: it can be had again. Raises `OSError`."""
    (directory / MANIFEST).write_bytes(msgspec.json.encode(Manifest(name, "", "")))


def bytes_of(directory: Path) -> int:
    """Of the files in `directory` themselves; links count nothing, nor what vanishes meanwhile."""
    size = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                path = Path(folder, file)
                size += 0 if path.is_symlink() else path.stat().st_size
    return size


def _directories(cache: Path) -> Iterator[Path]:
    for place in (cache, cache / ADAPTERS):
        for directory in sorted(place.glob("*")):
            finished = not directory.name.startswith(".")
            if directory.is_dir() and (finished or directory.name.endswith(_PARTIAL)):
                yield directory


def _kept(named: Named) -> set[str]:
    """Names of directories, in lower case."""
    kept = set()
    for source, revision in named:
        kept.add(directory_name(source, revision).lower())
        path = Path(source).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            kept.add(converted_name(path).lower())
        if path.is_absolute():
            kept.add(path.name.lower())
    return kept


def _reserved(scratch: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((scratch / PARTS / _RESERVED).read_text(encoding="ascii"))
    return 0


@contextlib.contextmanager
def _measuring(cache: Path) -> Iterator[None]:
    """One process at a time decides about the room of a cache."""
    (cache / LOCKS).mkdir(parents=True, exist_ok=True)
    with (cache / LOCKS / ".room").open("w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _no_room(
    store: Store, directory: Path, needed: int, entries: Sequence[CacheEntry], removals: Sequence[CacheEntry]
) -> str:
    held, free = sum(entry.bytes for entry in entries), shutil.disk_usage(store.cache).free
    limit = f" of at most {_size(store.cache_bytes)}" if store.cache_bytes else ""
    name = directory.name.replace("--", "/")
    could = ", ".join(entry.name for entry in removals[:_LISTED])
    bytes_ = _size(sum(entry.bytes for entry in removals))
    remedy = (
        f"`ryzanstein models clean` could remove {bytes_} ({could}{', ...' if len(removals) > _LISTED else ''})"
        if removals
        else "nothing there can be removed, since all of it is in use or named in the registry"
    )
    return (
        f"The model {name} needs {_size(needed)} more; the cache {store.cache} holds {_size(held)}{limit}, and its "
        f"disk has {_size(free)} free, of which {_size(RESERVE)} are reserved; {remedy}, or give it more room "
        "(RYZANSTEIN_MODEL_CACHE_BYTES, RYZANSTEIN_MODEL_CACHE)."
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10_000_000 else f"{count} bytes"
