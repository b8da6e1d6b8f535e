"""Blocks that leave a GPU and come back: byte for byte, and without anybody waiting."""

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import SingleRank
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.gpu import offload
from services.executor.gpu.offload import DeviceSpill, PinnedSlots
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.offload import BlockCopier, SpillStore
from services.executor.kv_cache.prefix_index import BlockKey
from services.executor.kv_cache.spill_file import SpillPlace, recover
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from shared.errors import ConfigurationError
from tests.pretend_gpu.device import pretend_gpu
from tests.pretend_gpu.streams import Host

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
HOST_SLOTS, DISK_SLOTS, BLOCKS = 5, 3, 6
CODECS: list[tuple[Codec | None, ...]] = [(None, None, None), (INT8, INT8, INT8), (FP8, None, INT8)]
Copies = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, and several segments of pinned memory."""
    monkeypatch.setattr(offload, "PART_BYTES", 5000)
    monkeypatch.setattr(offload, "SEGMENT_BYTES", 8192)


def store_of(codecs: tuple[Codec | None, ...], device: torch.device) -> KvStore:
    """Random blocks, on any device the same."""
    shape = StoreShape.uniform(len(codecs), 4, 2, 16, torch.float32, codecs)
    store = KvStore(shape, BLOCKS, device, BLOCKS if any(codecs) else 0)
    values = torch.Generator().manual_seed(3)
    for layer in range(len(codecs)):
        store.writable(layer).copy_(torch.randn(store.writable(layer).shape, generator=values).to(device))
    if store.num_quantized:
        store.compress([(block, BLOCKS + block) for block in range(BLOCKS)])
    return store


def plan(saves: Sequence[tuple[int, int]] = (), restores: Sequence[tuple[int, int]] = ()) -> StepPlan:
    copies = {"saves": to_bytes(list(saves)), "restores": to_bytes(list(restores))}
    return StepPlan(1, 0, b"", b"", b"", b"", b"", b"", b"", **copies)


def run(codecs: tuple[Codec | None, ...], steps: Sequence[Copies], device: torch.device, disk: Path) -> list[bytes]:
    """What all blocks are after these steps."""
    store = store_of(codecs, device)
    first = store.num_blocks - BLOCKS
    room = (HOST_SLOTS, DISK_SLOTS, store.shape.bytes_per_spilled_block, disk)
    spill = DeviceSpill(*room, device) if device == GPU else SpillStore(*room)
    with contextlib.closing(spill):
        copier = BlockCopier(store, spill, SingleRank())
        for number, step in enumerate(steps):
            saves = {slot: first + block for kind, block, slot in step if kind == "save"}
            restores = {first + block: slot for kind, block, slot in step if kind == "load"}
            given = plan([(block, slot) for slot, block in saves.items()], [(s, b) for b, s in restores.items()])
            with torch.inference_mode(number % 2 == 0):
                assert copier.run(given) == []
        return [store.save(block) for block in range(store.num_blocks)]


@st.composite
def steps_of_copies(draw: st.DrawFn) -> list[Copies]:
    """What is loaded was saved before, by the same step or an earlier one."""
    block, saved, steps = st.integers(0, BLOCKS - 1), set[int](), []
    for _ in range(draw(st.integers(1, 4))):
        step: Copies = []
        for _ in range(draw(st.integers(0, 6))):
            if saved and draw(st.booleans()):
                step.append(("load", draw(block), draw(st.sampled_from(sorted(saved)))))
            else:
                slot = draw(st.integers(0, HOST_SLOTS + DISK_SLOTS - 1))
                step.append(("save", draw(block), slot))
                saved.add(slot)
        steps.append(step)
    return steps


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(steps=steps_of_copies(), codecs=st.sampled_from(CODECS))
def test_blocks_are_what_they_are_on_a_cpu(
    tmp_path: Path, steps: list[Copies], codecs: tuple[Codec | None, ...]
) -> None:
    expected = run(codecs, steps, CPU, tmp_path)
    with pretend_gpu():
        assert run(codecs, steps, GPU, tmp_path) == expected


def test_nobody_waits_for_copies_to_host_memory(gpu: Host) -> None:
    store = store_of((INT8, INT8, INT8), GPU)
    spill = DeviceSpill(HOST_SLOTS, 0, store.shape.bytes_per_spilled_block, None, GPU)
    copier = BlockCopier(store, spill, SingleRank())
    blocks = [store.save(BLOCKS + block) for block in range(BLOCKS)]
    gpu.waits.clear()
    assert copier.run(plan(saves=[(BLOCKS + slot, slot) for slot in range(HOST_SLOTS)])) == []
    order = [4, 0, 3, 1, 2]
    assert copier.run(plan(restores=[(slot, BLOCKS + to) for to, slot in enumerate(order)])) == []
    assert gpu.waits == []
    assert [store.save(BLOCKS + to) for to in range(HOST_SLOTS)] == [blocks[slot] for slot in order]
    spill.close()
    spill.close()


def test_what_the_disk_has_lost_is_told(gpu: Host, tmp_path: Path) -> None:
    store = store_of((None, None, None), GPU)
    spill = DeviceSpill(1, 2, store.shape.bytes_per_spilled_block, tmp_path, GPU)
    with contextlib.closing(spill):
        assert spill.loses
        copier = BlockCopier(store, spill, SingleRank())
        assert copier.run(plan(saves=[(0, 0), (0, 1)])) == []
        assert copier.run(plan(restores=[(0, 1), (2, 2), (1, 3)])) == [2]
        assert store.save(1) == store.save(3) == store.save(0) != store.save(2)


def test_what_a_gpu_spills_to_disk_is_there_for_the_next_ring(gpu: Host, tmp_path: Path) -> None:
    store, key = store_of((None, None, None), GPU), BlockKey(b"d" * 16, b"p" * 16, b"t" * 4)
    size = store.shape.bytes_per_spilled_block
    place = SpillPlace(tmp_path, 0, 1, bytes(32), store.block_size, size, 2)
    content = store.save(0)
    for restored in (False, True):
        spill = DeviceSpill(1, 2, size, tmp_path, GPU)
        file, blocks = recover(place, torch.device("cpu"), SingleRank())
        assert file is not None
        spill.disk.keep_in(file, blocks)
        assert [(block.slot, block.key) for block in blocks] == [(1, key)] * restored
        if restored:
            assert BlockCopier(store, spill, SingleRank()).run(plan(restores=[(2, 1)])) == []
            assert store.save(1) == content
        else:
            saves = structs.replace(plan(saves=[(0, 0), (0, 2)]), save_keys=[key, key])
            assert BlockCopier(store, spill, SingleRank()).run(saves) == []
            spill.disk.flush()
        spill.close()


def test_slots_are_pinned_and_stay_where_they_are(gpu: Host) -> None:
    slots = PinnedSlots(10, 3000)
    found = [slots.slot(number) for number in range(10)]
    assert all(gpu.is_pinned(slot) and slot.numel() == 3000 for slot in found)
    assert [slots.slot(number).data_ptr() for number in range(10)] == [slot.data_ptr() for slot in found]
    ends = sorted((slot.data_ptr(), slot.data_ptr() + 3000) for slot in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))


def test_memory_that_cannot_be_had_is_told_at_start(gpu: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand more")

    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(ConfigurationError, match=r"30000 bytes .*\(CUDA error: out of memory\); .*--kv-host-memory"):
        PinnedSlots(10, 3000)
