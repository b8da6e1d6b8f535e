"""Files of adapters on a host's disk, which several rings share: another cache on the directory is another ring."""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from services.executor.leader.adapter_cache import AdapterCache
from shared.errors import StorageFull

DIGESTS = [f"{number:064x}" for number in range(4)]


def put(cache: AdapterCache, digest: str, size: int = 100) -> None:
    part = cache.begin(size)
    (part / "weights").write_bytes(b"w" * size)
    cache.add(digest, part)


def aged(root: Path, digest: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(root / digest, (then, then))


def test_the_least_recently_used_that_no_ring_holds_make_room(tmp_path: Path) -> None:
    ours, theirs = AdapterCache(tmp_path, 300), AdapterCache(tmp_path, 300)
    for number, digest in enumerate(DIGESTS[:3]):
        put(ours, digest)
        aged(tmp_path, digest, 100 - number)
    assert ours.room() == 0
    assert theirs.hold(DIGESTS[0]) == ours.hold(DIGESTS[0]) == tmp_path / DIGESTS[0]
    aged(tmp_path, DIGESTS[0], 200)  # the oldest, and in use
    put(ours, DIGESTS[3])
    assert [ours.has(digest) for digest in DIGESTS] == [True, False, True, True]
    ours.release(DIGESTS[0])
    aged(tmp_path, DIGESTS[0], 200)
    put(ours, DIGESTS[1])  # the other ring still holds the oldest
    assert [ours.has(digest) for digest in DIGESTS] == [True, True, False, True]
    theirs.close()
    assert theirs.in_use == set()
    aged(tmp_path, DIGESTS[0], 200)
    put(ours, DIGESTS[2])
    assert not ours.has(DIGESTS[0])


def test_what_does_not_fit_beside_those_in_use_is_refused(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, 250)
    put(cache, DIGESTS[0])
    assert cache.hold(DIGESTS[0]) == cache.hold(DIGESTS[0])
    with pytest.raises(StorageFull, match="200 bytes do not fit the 250 of --adapter-cache-bytes"):
        cache.begin(200)
    assert cache.has(DIGESTS[0])
    assert list(tmp_path.glob(".part-*")) == []


def test_parts_that_nobody_writes_any_more_are_deleted(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, 1000)
    abandoned, written = cache.begin(10), cache.begin(10)
    then = time.time() - 2 * 3600
    os.utime(abandoned, (then, then))
    cache.begin(10)
    assert not abandoned.exists()
    assert written.exists()


def test_of_two_rings_that_fetch_one_adapter_the_first_stays(tmp_path: Path) -> None:
    ours, theirs = AdapterCache(tmp_path, 1000), AdapterCache(tmp_path, 1000)
    first, second = ours.begin(10), theirs.begin(10)
    (first / "weights").write_bytes(b"first")
    (second / "weights").write_bytes(b"second")
    ours.add(DIGESTS[0], first)
    theirs.add(DIGESTS[0], second)
    assert (tmp_path / DIGESTS[0] / "weights").read_bytes() == b"first"
    assert list(tmp_path.glob(".part-*")) == []


def test_what_another_ring_deletes_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = AdapterCache(tmp_path, 1000), AdapterCache(tmp_path, 1000)
    assert ours.hold(DIGESTS[0]) is None
    put(ours, DIGESTS[0])
    lock = theirs._locked(DIGESTS[0], fcntl.LOCK_EX)
    assert lock is not None
    assert ours.hold(DIGESTS[0]) is None  # it is being deleted
    os.close(lock)
    locked = AdapterCache._locked

    def deleted_meanwhile(cache: AdapterCache, digest: str, how: int) -> int | None:
        shutil.rmtree(tmp_path / digest, ignore_errors=True)
        return locked(cache, digest, how)

    monkeypatch.setattr(AdapterCache, "_locked", deleted_meanwhile)
    assert ours.hold(DIGESTS[0]) is None
    assert ours.in_use == set()
