"""A rank's spilled bytes: what was saved last or nothing, whatever the disk does."""

import errno
import os
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.capacity import StoreShape, plan_spill
from services.executor.kv_cache.offload import BlockCopier, DiskSlots, SpillStore
from services.executor.kv_cache.store import KvStore
from shared.errors import ConfigurationError
from tests.unit.executor.model.ring import on_ring

SIZE = 64
SHAPE = StoreShape.uniform(num_layers=2, block_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)


def block(value: int) -> bytes:
    return bytes([value]) * SIZE


@pytest.fixture
def disk(tmp_path: Path) -> DiskSlots:
    return DiskSlots(SIZE, tmp_path / "made")


def test_what_was_saved_last_is_restored_from_memory_and_from_disk(tmp_path: Path) -> None:
    store = KvStore(SHAPE, 10, torch.device("cpu"))
    size = SHAPE.bytes_per_block
    spill = SpillStore(2, 3, size, tmp_path)
    for block in range(5):
        store.load(block, bytes([block + 1]) * size)
        spill.save(block, bytes(size))
    spill.save_blocks(store, [(block, block) for block in range(5)])
    pairs = [(slot, 9 - slot) for slot in range(5)]
    for flushed in (False, True):
        if flushed and spill.disk is not None:
            spill.disk.flush()
        for _, block in pairs:
            store.load(block, bytes(size))
        assert spill.load_blocks(store, pairs) == [True] * 5
        assert [store.save(block) for _, block in pairs] == [bytes([slot + 1]) * size for slot in range(5)]
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    spill.close()
    spill.close()
    assert spill.load_blocks(store, pairs) == [False] * 5


def test_what_was_never_saved_is_lost() -> None:
    spill = SpillStore(1, 0, SHAPE.bytes_per_block)
    assert spill.load_blocks(KvStore(SHAPE, 2, torch.device("cpu")), [(0, 0), (1, 1)]) == [False] * 2


@pytest.mark.parametrize("damage", [b"\x00", b""])
def test_bytes_that_have_changed_are_lost(disk: DiskSlots, damage: bytes) -> None:
    disk.save(0, block(1))
    disk.save(1, block(2))
    disk.flush()
    if damage:
        os.pwrite(disk._file, damage, SIZE + 5)
    else:
        os.ftruncate(disk._file, SIZE + 5)
    assert disk.load(1) is None
    assert disk.load(0) == block(1)
    disk.save(1, block(3))
    assert disk.load(1) == block(3)
    disk.close()


def broken(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_a_write_that_fails_loses_what_was_there_before_and_a_read_the_block(
    disk: DiskSlots, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    disk.save(0, block(1))
    disk.flush()
    monkeypatch.setattr(os, call, broken)
    if call == "pwrite":
        disk.save(0, block(2))
        disk.flush()
    assert disk.load(0) is None
    disk.close()


def test_a_slot_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill, content = SpillStore(1, 2, SIZE, tmp_path), bytes(range(SIZE))
    assert [spill.find(slot) for slot in range(3)] == [None] * 3
    spill.save(0, content)
    spill.save(1, content)
    spill.disk.flush()
    assert spill.find(0) == content
    assert spill.find(1) == zlib.crc32(content)
    room = bytearray(5)
    rooms = [memoryview(room)[:2], memoryview(room)[2:]]
    spill.expect(1, 7, 5)
    assert spill.read_into(1, rooms, 7)
    assert room == content[7:12]
    assert not spill.read_into(2, rooms, 0), "there are no bytes behind the last slot"
    monkeypatch.setattr(os, "preadv", broken)
    assert not spill.read_into(1, rooms, 7)
    spill.close()
    nowhere = SpillStore(0, 0, SIZE)
    assert nowhere.find(0) is None
    nowhere.expect(0, 0, 1)
    assert not nowhere.read_into(0, rooms, 0)


def test_a_slow_disk_loses_blocks_and_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began, write = threading.Event(), threading.Event(), os.pwrite

    def slow(*arguments: object) -> int:
        began.set()
        gate.wait(30)
        return write(*arguments)  # type: ignore[arg-type]

    disk = DiskSlots(SIZE, tmp_path, most_waiting=2 * SIZE)
    monkeypatch.setattr(os, "pwrite", slow)
    for slot in range(4):
        disk.save(slot, block(slot))
    began.wait(30)
    disk.save(0, block(7))
    assert [disk.load(slot) for slot in range(4)] == [block(7), block(1), None, None]
    gate.set()
    disk.flush()
    assert [disk.load(slot) for slot in range(4)] == [block(7), block(1), None, None]
    disk.close()


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--kv-disk-directory"):
        SpillStore(0, 1, SIZE, tmp_path / "file")


# --- a plan's copies -----------------------------------------------------------------------------


def plan(
    saves: list[tuple[int, int]] = [],  # noqa: B006
    restores: list[tuple[int, int]] = [],  # noqa: B006
) -> StepPlan:
    return StepPlan(1, 0, b"", b"", b"", b"", b"", b"", b"", saves=to_bytes(saves), restores=to_bytes(restores))


def test_all_ranks_agree_on_what_cannot_be_restored() -> None:
    def rank(collectives: Collectives) -> tuple[list[int], bool]:
        store = KvStore(SHAPE, 4, torch.device("cpu"))
        keys = torch.full((4, 2, 8), 1.0 + collectives.rank)
        store.write(0, torch.arange(4), keys, keys)
        spill = SpillStore(3, 0, SHAPE.bytes_per_block)
        copier = BlockCopier(store, spill, collectives)
        assert copier.run(plan(saves=[(0, 0), (0, 1), (1, 2)])) == []
        if collectives.rank == 1:
            del spill._host[1]
        failed = copier.run(plan(restores=[(0, 2), (1, 3)]))
        same = store.save(2) == store.save(0)
        return failed, same

    assert on_ring(2, rank) == [([1], True)] * 2


def test_slots_in_a_budget() -> None:
    size = SHAPE.bytes_per_block
    counts = plan_spill(SHAPE, 3 * size - 1, 10 * size)
    assert (counts.host, counts.disk) == (2, 10)
    assert counts.copies_per_step >= 1
    assert np.prod(counts) > 0
