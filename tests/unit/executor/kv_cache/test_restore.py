"""Restores that go on beside a step: page layer by page layer, in order, and what is lost is told."""

import threading
import zlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.executor.core.layer_state import Pages
from services.executor.kv_cache import restore
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.kv_cache.restore import LayeredRestore, in_order_of_use, layers_ready
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape

CPU = torch.device("cpu")
KINDS = [Pages(2, 2, 8), Pages(1, 3, 16)]
SHAPES = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([None, INT8, FP8])), min_size=1, max_size=5)


def store_of(pages: list[tuple[Pages, object]], *, quantized: bool) -> KvStore:
    codecs = tuple(codec for _, codec in pages) if quantized else ()
    shape = StoreShape(4, torch.bfloat16, tuple(one for one, _ in pages), codecs, ())  # type: ignore[arg-type]
    return KvStore(shape, 6, CPU, 6 if quantized else 0)


def filled(store: KvStore, block: int, seed: int) -> bytes:
    random = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (store.block_bytes(block),), generator=random, dtype=torch.uint8)
    return content.numpy().tobytes()


class Fake:
    """Slots whose bytes come when they are let."""

    def __init__(self, contents: dict[int, bytes], on_disk: set[int]) -> None:
        self._contents, self._on_disk = contents, on_disk
        self.gate = threading.Semaphore(0)  # released once for each read that may happen
        self.broken: set[int] = set()
        self.damaged: set[int] = set()
        self.expected: list[tuple[int, int, int]] = []
        self.reads: list[tuple[int, int, int]] = []

    def find(self, slot: int) -> bytes | int | None:
        content = self._contents.get(slot)
        if content is None or slot not in self._on_disk:
            return content
        return zlib.crc32(content) ^ (slot in self.damaged)

    def expect(self, slot: int, offset: int, size: int) -> None:
        self.expected.append((slot, offset, size))

    def read_into(self, slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        assert self.gate.acquire(timeout=30)
        self.reads.append((slot, offset, sum(map(len, rooms))))
        if slot in self.broken:
            return False
        for room in rooms:
            room[:] = self._contents[slot][offset : offset + len(room)]
            offset += len(room)
        return True


@settings(max_examples=30)
@given(
    pages=SHAPES,
    quantized=st.booleans(),
    on_disk=st.sets(st.integers(0, 2)),
    at_once=st.sampled_from([1, 1 << 20]),
    small=st.sampled_from([1, 64, 1 << 20]),
    most_rooms=st.sampled_from([1, 3, 1024]),
    beside=st.booleans(),
)
def test_what_is_brought_is_what_was_saved(
    pages: list[tuple[Pages, object]],
    quantized: bool,
    on_disk: set[int],
    at_once: int,
    small: int,
    most_rooms: int,
    beside: bool,
) -> None:
    store, expected = store_of(pages, quantized=quantized), store_of(pages, quantized=quantized)
    first = 6 if quantized else 0
    pairs = [(0, first + 4), (2, first + 1), (1, first + 2)]
    contents = {slot: filled(store, block, slot) for slot, block in pairs}
    slots = Fake(contents, on_disk)
    slots.gate.release(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "READ_BYTES", at_once)
        patch.setattr(restore, "SMALL_BYTES", small)
        patch.setattr(restore, "_MOST_ROOMS", most_rooms)
        if beside:
            found = LayeredRestore(store, slots, pairs, range(len(pages)), lambda: None)
            found.join()
            assert found.lost == [False] * 3
            assert found.ready > len(pages)
        else:
            assert restore.restore(store, slots, pairs) == [True] * 3
            assert slots.expected == []
            assert [slot for slot, _, _ in slots.reads] == sorted(slot for slot, _, _ in slots.reads)
    for slot, block in pairs:
        expected.load(block, contents[slot])
    for block in range(first, first + 6):
        assert store.save(block) == expected.save(block)
    assert set(slots.expected) <= set(slots.reads), "what is read ahead is read"
    assert len(set(slots.reads)) == len(slots.reads), "all is read once"
    assert sum(size for _, _, size in slots.reads) == sum(len(contents[slot]) for slot in on_disk)


def test_small_blocks_are_read_whole_and_large_ones_in_parts() -> None:
    store = store_of([(KINDS[0], INT8)] * 3, quantized=True)
    contents = {0: filled(store, 6, 0)}
    for at_once, reads in ((1 << 20, 1), (1, 4)):  # the last is that of the scales
        slots = Fake(contents, {0})
        slots.gate.release(1000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restore, "READ_BYTES", at_once)
            patch.setattr(restore, "SMALL_BYTES", 64)
            LayeredRestore(store, slots, [(0, 6)], [0, 1, 2], lambda: None).join()
        assert len(slots.reads) == reads
        assert len(slots.expected) == (2 if reads > 1 else 0), "those behind the first"
        assert store.save(6) == contents[0]


def test_layers_are_ready_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "READ_BYTES", 1)
    monkeypatch.setattr(restore, "SMALL_BYTES", 1)
    store = store_of([(KINDS[0], None)] * 3, quantized=False)
    slots = Fake({0: filled(store, 0, 0), 1: filled(store, 0, 1)}, {0, 1})
    ticks = threading.Semaphore(0)
    found = LayeredRestore(store, slots, [(0, 0), (1, 1)], [0, 1, 1, 2], ticks.release)
    for ready in (1, 3):
        assert found.ready < ready
        slots.gate.release(2)  # one page layer of both blocks
        assert ticks.acquire(timeout=30)
        assert found.ready == ready
    slots.gate.release(2)
    found.join()
    assert found.ready > 4
    assert found.lost == [False, False]


@pytest.mark.parametrize("beside", [False, True])
def test_what_cannot_be_read_is_lost_and_nothing_waits_for_it(beside: bool) -> None:
    store = store_of([(KINDS[0], INT8)] * 2, quantized=True)
    contents = {slot: filled(store, 6, slot) for slot in range(4)}
    del contents[3]
    slots = Fake(contents, {1, 2, 3})
    slots.broken, slots.damaged = {1}, {2}
    slots.gate.release(1000)
    pairs = [(slot, 6 + slot) for slot in range(4)]
    for _, block in pairs:
        store.load(block, filled(store, block, 7))
    if beside:
        found = LayeredRestore(store, slots, pairs, [0, 1], lambda: None)
        found.join()
        assert found.lost == [False, True, True, True]
        assert found.ready > 2
    else:
        assert restore.restore(store, slots, pairs) == [True, False, False, False]
    assert store.save(6) == contents[0]
    for block in (7, 8, 9):
        assert not any(store.save(block)), "wrong bytes may be no numbers"


def test_a_reader_that_fails_loses_all_and_nothing_waits_for_it() -> None:
    store = store_of([(KINDS[0], None)], quantized=False)
    slots = Fake({0: b"too short"}, set())
    with capture_logs() as log:
        found = LayeredRestore(store, slots, [(0, 0)], [0], lambda: None)
        found.join()
    assert found.lost == [True]
    assert found.ready > 1
    assert [line["event"] for line in log] == ["kv_restore_failed"]


def test_pages_that_no_layer_attends_to_come_first() -> None:
    assert in_order_of_use([1, 0, 1, 3], 5) == [2, 4, 1, 0, 3]
    assert layers_ready([1, 0, 1, 3], {2, 4}) == 0
    assert layers_ready([1, 0, 1, 3], {1}) == 1
    assert layers_ready([1, 0, 1, 3], {0, 1}) == 3
    assert layers_ready([1, 0], {0, 1}) > 2
