"""One rank's bytes of the blocks that were evicted, in host memory, then on disk; and the copies of blocks that a plan
carries.

Which block is in which slot is the leader's to know (`offload_tiers.py`); a slot here is just bytes. The file on disk
has no name and goes with the process, however it ends; or it is one that says of its slots which blocks they hold, and
outlives the ring (`spill_file.py`).

    save ──▶ waiting (in memory) ──▶ file        by a thread of its own: a step never waits for a write
               └──────── load ────────┘          checked against the checksum of what was saved last

What cannot be read, or is not what was saved, is lost, and never wrong bytes.

`BlockCopier` executes the copies of a plan; `block_pool.py` says why in this order.
"""

import contextlib
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from services.executor.collectives.base import Collectives
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.kv_cache.prefix_index import BlockKey
from services.executor.kv_cache.restore import LayeredRestore, restore
from services.executor.kv_cache.spill_file import KeptBlock, SpillFile
from services.executor.kv_cache.store import KvStore
from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)

# Saved blocks that wait to be written; what would be more is lost rather than waited for.
MOST_WAITING_BYTES = 64 << 20


class Arriving(Protocol):
    """The bytes of a block that are on their way into this process's memory."""

    def wait(self) -> bytes: ...


class Spill(Protocol):
    @property
    def loses(self) -> bool:
        """Whether a block that was saved may not come back."""
        ...

    @property
    def disk(self) -> "DiskSlots | None":
        """Its slots on disk; None: it has none."""
        ...

    def save_blocks(self, store: KvStore, pairs: Sequence[tuple[int, int]], keys: Sequence[BlockKey] = ()) -> None:
        """Keeps blocks of `store` in slots, (block, slot) each, whatever was there before. `keys`: what each of them
        holds; without them they do not outlive the ring."""
        ...

    def load_blocks(self, store: KvStore, pairs: Sequence[tuple[int, int]]) -> list[bool]:
        """Puts slots into blocks, (slot, block) each, and says of each whether it was there."""
        ...

    def close(self) -> None: ...


class SpillStore:
    """Slots [0, num_host) in memory and [num_host, num_host + num_disk) on disk, `block_bytes` each at most."""

    loses = True

    def __init__(
        self, num_host: int, num_disk: int, block_bytes: int, directory: Path | None = None, *, beside: bool = False
    ) -> None:
        """`directory`: where the file goes; None: where the system keeps temporary files. `beside`: whether steps
        begin while blocks are restored, the same on all ranks. Raises `ConfigurationError` when a file cannot be made
        there."""
        self.beside = beside
        self._num_host = num_host
        self._host: dict[int, bytes] = {}
        self.disk = DiskSlots(block_bytes, directory) if num_disk else None

    def save_blocks(self, store: KvStore, pairs: Sequence[tuple[int, int]], keys: Sequence[BlockKey] = ()) -> None:
        for (block, slot), key in zip_longest(pairs, keys):
            self.save(slot, store.save(block), key)

    def load_blocks(self, store: KvStore, pairs: Sequence[tuple[int, int]]) -> list[bool]:
        return restore(store, self, pairs)

    def save(self, slot: int, content: bytes, key: BlockKey | None = None) -> None:
        """Keeps `content` in `slot`, whatever was there before; `key`: see `save_blocks`."""
        if slot < self._num_host:
            self._host[slot] = content
        elif self.disk is not None:
            self.disk.save(slot - self._num_host, content, key)

    def find(self, slot: int) -> bytes | int | None:
        """See `restore.Slots`."""
        if slot < self._num_host:
            return self._host.get(slot)
        return None if self.disk is None else self.disk.find(slot - self._num_host)

    def expect(self, slot: int, offset: int, size: int) -> None:
        """See `restore.Slots`."""
        if self.disk is not None:
            self.disk.expect(slot - self._num_host, offset, size)

    def read_into(self, slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        """See `restore.Slots`."""
        return self.disk is not None and self.disk.read_into(slot - self._num_host, rooms, offset)

    def close(self) -> None:
        """Frees memory and disk. Safe to call twice."""
        self._host = {}
        if self.disk is not None:
            self.disk.close()


class DiskSlots:
    """Slots of equal size in a file without a name, or in one that outlives the ring. One thread at a time saves and
    loads."""

    def __init__(self, block_bytes: int, directory: Path | None, most_waiting: int = MOST_WAITING_BYTES) -> None:
        """`most_waiting`: bytes that wait to be written at most."""
        self._block_bytes = block_bytes
        self._most_waiting = max(1, most_waiting // block_bytes)
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix="ryzanstein-kv-", dir=directory)
            Path(name).unlink()
        except OSError as error:
            raise ConfigurationError(
                f"No file for spilled KV blocks can be made in {directory or tempfile.gettempdir()} "
                f"({error.strerror}); name a directory that can be written to with --kv-disk-directory."
            ) from error
        self._kept: SpillFile | None = None
        self._checksums: dict[int, int] = {}
        self._waiting: dict[int, _Saved] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._complained = False
        self._writer = threading.Thread(target=self._write_all, name="kv-spill", daemon=True)
        self._writer.start()

    def keep_in(self, file: SpillFile, blocks: Iterable[KeptBlock]) -> None:
        """The slots are in `file` from now on, `blocks` of them from before. To be called before anything is saved."""
        os.close(self._file)
        self._kept, self._file = file, file.blocks
        self._checksums = {block.slot: block.checksum for block in blocks}

    def save(self, slot: int, content: bytes | Arriving, key: BlockKey | None = None) -> None:
        """Returns at once; what finds too much waiting is lost. `key`: what it holds, where it is to outlive the
        ring."""
        with self._changed:
            self._checksums.pop(slot, None)
            if slot in self._waiting or len(self._waiting) < self._most_waiting:
                self._waiting[slot] = _Saved(content, key)
                self._changed.notify_all()

    def find(self, slot: int) -> bytes | int | None:
        """What was saved last, where it waits to be written; else the checksum of what is on disk; None: it is lost."""
        with self._changed:
            waiting = self._waiting.get(slot)
            checksum = self._checksums.get(slot)
        # Only `save` makes a slot wait again, and not meanwhile.
        return checksum if waiting is None else waiting.arrived()

    def expect(self, slot: int, offset: int, size: int) -> None:
        """Has the system read `size` bytes of a slot ahead."""
        with contextlib.suppress(OSError):  # it is advice
            os.posix_fadvise(self._file, slot * self._block_bytes + offset, size, os.POSIX_FADV_WILLNEED)

    def read_into(self, slot: int, rooms: Sequence[memoryview], offset: int) -> bool:
        """Fills `rooms` from byte `offset` of a slot on, unchecked; whether it could."""
        try:
            count = os.preadv(self._file, rooms, slot * self._block_bytes + offset)
        except OSError as error:
            self._complain(error)
            return False
        return count == sum(map(len, rooms))

    def load(self, slot: int) -> bytes | None:
        """What was saved to `slot` last; None where it is lost."""
        checksum = self.find(slot)
        if not isinstance(checksum, int):
            return checksum
        try:
            content = os.pread(self._file, self._block_bytes, slot * self._block_bytes)
        except OSError as error:
            self._complain(error)
            return None
        if zlib.crc32(content) != checksum:
            self._complain(None)
            return None
        return content

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was saved has been written, or has failed to be, for `timeout` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._closed, timeout)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join()
        if self._kept is not None:
            self._kept.close()
        elif self._file >= 0:
            os.close(self._file)
        self._file = -1

    # --- the writer's thread ---------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                slot, saved = next(iter(self._waiting.items()))
            checksum = self._write(slot, saved.arrived(), saved.key)
            with self._changed:
                if self._waiting[slot] is saved:  # else it has been saved anew meanwhile
                    del self._waiting[slot]
                    if checksum is not None:
                        self._checksums[slot] = checksum
                self._changed.notify_all()

    def _write(self, slot: int, content: bytes, key: BlockKey | None) -> int | None:
        """The checksum of what has been written; None when it has not."""
        view, offset, checksum = memoryview(content), slot * self._block_bytes, zlib.crc32(content)
        try:
            if self._kept is not None:
                self._kept.clear(slot)  # first: a process that is killed now leaves no record of other bytes
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
            if self._kept is not None and key is not None:
                self._kept.put(slot, key, checksum)
        except OSError as error:
            self._complain(error)
            return None
        return checksum

    def _complain(self, error: OSError | None) -> None:
        """Once: a full disk would fill the log."""
        if not self._complained:
            self._complained = True
            reason = "the bytes are not those that were written" if error is None else str(error)
            log.warning("kv_spill_failed", reason=reason, effect="spilled KV blocks are computed again")


class _Saved(NamedTuple):
    """What waits to be written."""

    content: bytes | Arriving
    key: BlockKey | None

    def arrived(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.wait()


class TransferEndpoint(Protocol):
    """What is needed of the rank's side of hand-overs (`services/executor/kv_transfer`)."""

    def obey(self, payload: bytes) -> None: ...

    def take(self, slot: int) -> bytearray: ...


class BlockCopier:
    """Between a rank's store and its spilled bytes. All ranks of a ring run the same plans in order."""

    def __init__(self, store: KvStore, spill: Spill | None, collectives: Collectives) -> None:
        self._store = store
        self._spill = spill
        self._collectives = collectives
        self.endpoint: TransferEndpoint | None = None  # None: this ring hands nothing over

    def run(self, plan: StepPlan) -> list[int]:
        """Saves, adopts, restores: blocks, and slots whose bytes lie in blocks. Returns the spill slots that some rank
        cannot restore: the same answer on every rank, for which they ask each other only where a plan restores what
        may be lost."""
        self._make_room(plan)
        failed = self._restore(plan) if plan.restores else []
        if plan.state_loads:
            self._store.load_states(self._snapshots(plan.state_loads))
        return failed

    def begin(self, plan: StepPlan, pages_of_layers: Sequence[int], tick: Callable[[], None]) -> LayeredRestore:
        """As `run`, for a plan that `can_begin`: its restores go on beside the forward pass, until `finish`."""
        assert isinstance(self._spill, SpillStore), "its slots are not read layer by layer"
        self._make_room(plan)
        pairs = [(slot, block) for slot, block in _pairs(plan.restores).tolist()]
        return LayeredRestore(self._store, self._spill, pairs, pages_of_layers, tick)

    def can_begin(self, plan: StepPlan) -> bool:
        """Whether there are restores that the forward pass may begin before, and that may fail behind it: what it
        computes of recurrent states cannot be computed again."""
        beside = isinstance(self._spill, SpillStore) and self._spill.beside
        return bool(plan.restores) and beside and self._store.states is None

    def finish(self, plan: StepPlan, restore: LayeredRestore) -> list[int]:
        """What `run` returns."""
        restore.join()
        return self._agreed(_pairs(plan.restores), [not lost for lost in restore.lost])

    def _make_room(self, plan: StepPlan) -> None:
        if plan.saves:
            keys = [BlockKey(*key) for key in plan.save_keys]
            self._spilled.save_blocks(self._store, _pairs(plan.saves).tolist(), keys)
        if plan.state_saves:
            self._store.save_states(self._snapshots(plan.state_saves))
        self._hand_over(plan)

    def _restore(self, plan: StepPlan) -> list[int]:
        restores = _pairs(plan.restores)
        found = self._spilled.load_blocks(self._store, restores.tolist())
        if not self._spilled.loses:  # asking would wait for the device
            assert all(found), "a plan restores what was never saved"
            return []
        return self._agreed(restores, found)

    def _agreed(self, restores: NDArray[np.int32], found: Sequence[bool]) -> list[int]:
        """The slots of `restores` that some rank has not `found`."""
        lost = np.array([0.0 if there else 1.0 for there in found], dtype=np.float32)
        if self._collectives.world_size > 1:
            flags = torch.from_numpy(lost).to(self._store.device)
            lost = self._collectives.all_reduce(flags).cpu().numpy()
        return [int(slot) for slot in restores[lost > 0, 0]]

    def _snapshots(self, payload: bytes) -> NDArray[np.int32]:
        return as_int32(payload).reshape(-1, 1 + self._store.blocks_per_snapshot)

    def _hand_over(self, plan: StepPlan) -> None:
        if self.endpoint is None:
            return
        for slot, block in _pairs(plan.adoptions).tolist():
            self._store.load(block, self.endpoint.take(slot))
        if plan.handover:
            self.endpoint.obey(plan.handover)

    @property
    def _spilled(self) -> Spill:
        assert self._spill is not None, "a plan spills blocks, and the rank has nowhere to spill to"
        return self._spill


def _pairs(payload: bytes) -> NDArray[np.int32]:
    return as_int32(payload).reshape(-1, 2)
