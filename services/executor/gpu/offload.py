"""One rank's bytes of the blocks that were evicted from a GPU: no step waits for what it evicts, nor for what it
restores from host memory. What comes from disk is read first.

    save     blocks ─▶ packed, one after another ─┐ the step's stream goes on
                                                  ├▶ slots in pinned memory      a stream of its own, beside the step
                                                  └▶ pinned memory ─▶ disk       whose thread waits

    load     slots ─▶ packed ─▶ blocks            the step's stream, once what was saved before is there

What the CPU's `kv_cache/offload.py` says of slots holds here. Memory is pinned at start: what cannot be had is told
then, and no step waits until it is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.executor.kv_cache.offload import DiskSlots
from services.executor.kv_cache.prefix_index import BlockKey
from services.executor.kv_cache.store import KvStore
from services.executor.platforms.base import sent
from shared.errors import ConfigurationError, reason_of

PART_BYTES = 16 << 20  # of blocks that are packed at a time, on the device
SEGMENT_BYTES = 256 << 20  # pinned at a time. A power of two: PyTorch rounds pinned memory up to one


class PinnedSlots:
    """Slots of equal size in pinned memory."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """Raises `ConfigurationError` where there is not as much memory."""
        self._block_bytes = block_bytes
        self._per_segment = max(1, SEGMENT_BYTES // block_bytes)
        wanted = [
            min(self._per_segment, num_slots - first) * block_bytes for first in range(0, num_slots, self._per_segment)
        ]
        try:
            self._segments = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in wanted]
        except (RuntimeError, MemoryError) as error:
            raise ConfigurationError(
                f"{sum(wanted)} bytes of host memory for spilled KV blocks cannot be pinned ({reason_of(error)}); give "
                "each rank less with --kv-host-memory, or the host or container more memory."
            ) from error

    def slot(self, number: int) -> Tensor:
        """uint8 [bytes of a block], always the same memory."""
        at, place = divmod(number, self._per_segment)
        start = place * self._block_bytes
        return self._segments[at][start : start + self._block_bytes]


class _Copied:
    """Bytes in pinned memory, once `event` has happened."""

    def __init__(self, content: Tensor, event: Any) -> None:
        self._content, self._event = content, event

    def wait(self) -> bytes:
        self._event.synchronize()
        return self._content.numpy().tobytes()


class DeviceSpill:
    """A `kv_cache.spill.Spill`: slots [0, num_host) in pinned memory and [num_host, num_host + num_disk) on disk."""

    def __init__(
        self, num_host: int, num_disk: int, block_bytes: int, directory: Path | None, device: torch.device
    ) -> None:
        """As `kv_cache.spill.SpillStore`. Raises `ConfigurationError` where it cannot have that memory, or file."""
        self._num_host = num_host
        self._block_bytes = block_bytes
        self._device = device
        self._host = PinnedSlots(num_host, block_bytes)
        self._held: set[int] = set()  # slots of host memory that were saved to
        self.disk = DiskSlots(block_bytes, directory) if num_disk else None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def loses(self) -> bool:
        return self.disk is not None

    def save_blocks(self, store: KvStore, pairs: Sequence[tuple[int, int]], keys: Sequence[BlockKey] = ()) -> None:
        named = {slot: key for (_, slot), key in zip(pairs, keys, strict=False)}
        for part in self._parts(pairs):
            packed = store.pack(self._ids([block for block, _ in part]))
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for row, (_, slot) in zip(packed, part, strict=True):
                    self._keep(slot, row, named.get(slot))
            packed.record_stream(self._stream)  # its memory is not to be had before these copies are over

    def load_blocks(self, store: KvStore, pairs: Sequence[tuple[int, int]]) -> list[bool]:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return [there for part in self._parts(pairs) for there in self._restore(store, part)]

    def close(self) -> None:
        """Frees memory and disk. Safe to call twice."""
        self._host, self._held = PinnedSlots(0, self._block_bytes), set()
        if self.disk is not None:
            self.disk.close()

    def _keep(self, slot: int, row: Tensor, key: BlockKey | None) -> None:
        """Begins to copy `row`, uint8 on the device, in the current stream."""
        if slot < self._num_host:
            self._host.slot(slot).copy_(row, non_blocking=True)
            self._held.add(slot)
        elif self.disk is not None:
            content = torch.empty(len(row), dtype=torch.uint8, pin_memory=True)
            content.copy_(row, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.disk.save(slot - self._num_host, _Copied(content, event), key)

    def _restore(self, store: KvStore, part: Sequence[tuple[int, int]]) -> list[bool]:
        contents = [self._content(slot) for slot, _ in part]
        found = [(block, content) for (_, block), content in zip(part, contents, strict=True) if content is not None]
        if found:
            packed = torch.empty((len(found), self._block_bytes), dtype=torch.uint8, device=self._device)
            for row, (_, content) in zip(packed, found, strict=True):
                row.copy_(content, non_blocking=True)
            store.unpack(self._ids([block for block, _ in found]), packed)
        return [content is not None for content in contents]

    def _content(self, slot: int) -> Tensor | None:
        """uint8, in pinned memory; on the device's side it is there once its stream waits for the copies."""
        if slot < self._num_host:
            return self._host.slot(slot) if slot in self._held else None
        content = None if self.disk is None else self.disk.load(slot - self._num_host)
        return None if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8).pin_memory()

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return sent(np.array(blocks, dtype=np.int64), self._device)

    def _parts(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        count = max(1, PART_BYTES // self._block_bytes)
        return (pairs[first : first + count] for first in range(0, len(pairs), count))
