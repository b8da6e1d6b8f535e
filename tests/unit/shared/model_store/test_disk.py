"""Room in a model cache: who is removed for whom, and what is said where nobody can be."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store import disk
from shared.model_store.catalog import ensure_model, list_models
from shared.model_store.disk import CacheEntry, choose_removals, collect, excess_of, make_room, remove_model
from shared.model_store.locks import claimed, hold_model, lock_path, partial
from shared.model_store.repository import MANIFEST, PARTS, Manifest
from shared.model_store.settings import Store
from tests.unit.shared.model_store.test_catalog import convert

ENTRIES = st.lists(
    st.builds(
        CacheEntry,
        directory=st.integers(0, 99).map(lambda number: Path(f"m{number}")),
        bytes=st.integers(0, 1000),
        promised=st.integers(0, 1000),
        used=st.floats(0, 100),
        removable=st.booleans(),
    ),
    max_size=12,
)


@given(ENTRIES, st.integers(1, 3000))
def test_the_least_recently_used_go_and_no_more_than_must(entries: list[CacheEntry], excess: int) -> None:
    chosen = choose_removals(entries, excess)
    freed = sum(entry.bytes for entry in chosen)
    assert all(entry.removable for entry in chosen)
    removable = sorted((entry for entry in entries if entry.removable), key=lambda entry: entry.used)
    assert chosen == removable[: len(chosen)]
    assert freed >= excess or chosen == removable
    assert not chosen or freed - chosen[-1].bytes < excess


@given(ENTRIES, st.integers(0, 3000), st.integers(0, 5000))
def test_what_is_within_the_limit_and_the_disk_needs_nothing_removed(
    entries: list[CacheEntry], needed: int, limit: int
) -> None:
    held = sum(entry.bytes + entry.promised for entry in entries)
    assert (excess_of(entries, needed, limit, 1 << 60) > 0) == bool(limit and held + needed > limit)
    promised = sum(entry.promised for entry in entries)
    short = excess_of(entries, needed, 0, disk.RESERVE)
    assert short == (needed + promised if needed else 0)


def make(store: Store, name: str, size: int, used: float, *, ours: bool = True) -> Path:
    directory = store.cache / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(size))
    if ours:
        (directory / MANIFEST).write_bytes(msgspec.json.encode(Manifest(name, "", "c0")))
    lock_path(directory).parent.mkdir(exist_ok=True)
    lock_path(directory).touch()
    os.utime(lock_path(directory), (used, used))
    return directory


def names(store: Store) -> list[str]:
    return [model.name for model in list_models(store.cache)]


@pytest.fixture
def full(store: Store) -> Store:
    """Five models of 100,000 bytes in a cache that may hold little more."""
    for used, name in enumerate(["org--old", "org--named", "org--held", "org--mid", "org--new"]):
        make(store, name, 100_000, 1000.0 + used)
    make(store, "by-hand", 10, 1.0, ours=False)
    return msgspec.structs.replace(store, cache_bytes=520_000)


def test_room_is_made_of_what_nobody_wants(full: Store) -> None:
    with hold_model(full.cache / "org--held", full.cache), claimed(full.cache / "org--next", lambda: None):
        make_room(full, full.cache / "org--next", 150_000, [("org/named", "")])
        assert names(full) == ["by-hand", "org/held", "org/named", "org/new"]
        assert not [path for path in full.cache.iterdir() if "removed" in path.name]


@pytest.mark.parametrize("named", [None, [("org/named", "")]])
def test_where_there_is_no_room_it_is_said_what_could_go(full: Store, named: disk.Named | None) -> None:
    needed = 150_000 if named is None else 450_000
    said = r"ryzanstein models clean` could remove 0\.\d+ GB|could remove \d+ bytes \(org/old"
    with claimed(full.cache / "org--next", lambda: None), pytest.raises(ConfigurationError, match=said):
        make_room(full, full.cache / "org--next", needed, named)
    assert len(names(full)) == 6


def test_a_disk_that_is_too_small_is_said_before_a_byte_comes(store: Store) -> None:
    with (
        claimed(store.cache / "org--next", lambda: None),
        pytest.raises(ConfigurationError, match=r"needs 1000000000000000\.00 GB more; .* nothing there can be"),
    ):
        make_room(store, store.cache / "org--next", 10**24, [])


def test_two_downloads_do_not_share_one_room(store: Store) -> None:
    store = msgspec.structs.replace(store, cache_bytes=1_000_000)
    first, second = store.cache / "org--first", store.cache / "org--second"
    with claimed(first, lambda: None, keep=True):
        make_room(store, first, 700_000, [])
        with claimed(second, lambda: None), pytest.raises(ConfigurationError, match="needs 600000 bytes more"):
            make_room(store, second, 600_000, [])
    with claimed(second, lambda: None):  # the first has given up, and nothing of it had come
        make_room(store, second, 600_000, [])


def test_another_process_holds_a_model_until_it_ends(full: Store) -> None:
    code = (
        "import sys; from pathlib import Path; from shared.model_store.locks import hold_model\n"
        "hold_model(Path(sys.argv[1]), Path(sys.argv[1]).parent); print('held', flush=True); sys.stdin.read()"
    )
    held = full.cache / "org--held"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ModelLoadError, match="is in use; unload it first"):
            remove_model("org/held", "", full)
        assert held.name.replace("--", "/") in names(full)
        process.kill()
    assert remove_model("org/held", "", full)
    assert not remove_model("org/held", "", full)
    with pytest.raises(ModelLoadError, match="has just been removed"):
        hold_model(held, full.cache)


def test_garbage_is_collected_to_a_size(full: Store) -> None:
    left = partial(full.cache / "org--given-up")
    left.mkdir()
    (left / PARTS).mkdir()
    (left / PARTS / "0").write_bytes(bytes(100))
    os.utime(left, (1.0, 1.0))
    (full.cache / ".org--x.1.removed").mkdir()
    named = [("org/named", "")]
    listed = [entry.name for entry in collect(full, named, 250_000, dry_run=True)]
    assert listed == ["org/given-up", "org/old", "org/held", "org/mid"]
    assert len(names(full)) == 6
    assert [entry.name for entry in collect(full, named, None, dry_run=False)] == ["org/given-up"]
    assert [entry.name for entry in collect(full, named, 0, dry_run=False)] == [*listed[1:], "org/new"]
    assert names(full) == ["by-hand", "org/named"]
    assert not left.exists()


def test_what_is_served_from_a_file_elsewhere_counts_little_and_is_named_by_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.model_store.catalog.convert_gguf", convert)
    gguf = tmp_path / "my.gguf"
    gguf.write_bytes(bytes(100_000))
    _, directory = ensure_model(str(gguf), store, lambda *step: None)
    assert disk.bytes_of(directory) < 1000
    assert collect(store, [(str(gguf), "")], 0, dry_run=False) == []
    assert [entry.directory for entry in collect(store, [], 0, dry_run=False)] == [directory]
    assert gguf.is_file()


def test_what_lies_in_no_cache_is_not_locked(store: Store, tmp_path: Path) -> None:
    directory = make(Store(tmp_path / "elsewhere"), "model", 1, 1.0)
    before = sorted(path.name for path in directory.parent.rglob("*"))
    hold_model(directory, store.cache).release()
    assert sorted(path.name for path in directory.parent.rglob("*")) == before
