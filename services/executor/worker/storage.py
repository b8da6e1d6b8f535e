"""A rank's KV store, what it spills to, and what of that is there from before it started."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.engine import SpilledBlock
from services.executor.core.layer_state import LayerStates, page_layers
from services.executor.core.settings import ExecutorSettings, numeric_settings, served_name, spare_cores
from services.executor.kv_cache.block_memory import MappedFiles
from services.executor.kv_cache.capacity import (
    BlockCounts,
    SpillCounts,
    agree_on_slots,
    blocks_of_a_snapshot,
    mapped_window,
    plan_store,
    smallest,
)
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.spill_file import SpillPlace, recover
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.card import files_stamp
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.weights import Share
from shared.process import VERSION

log = structlog.get_logger(__name__)


class RankStorage(NamedTuple):
    """A rank's KV store, with what it spills to."""

    shape: StoreShape
    blocks: BlockCounts
    slots: SpillCounts
    store: KvStore
    own_store: KvStore  # the page layers of the model that is served: all but its draft model's
    spill: Spill
    window: int  # bytes of memory that mapped blocks have at least

    @classmethod
    def make(
        cls,
        settings: ExecutorSettings,
        share: Share,
        context: int,
        device: torch.device,
        collectives: Collectives,
        of_draft: LayerStates,
    ) -> "RankStorage":
        """`context`: tokens of one sequence, which must fit; `of_draft`: what the draft model's layers keep. Raises
        `ConfigurationError`."""
        shape, blocks = plan_store(
            settings,
            share.facts.states,
            share.dtype,
            share.reads_compressed,
            context,
            device,
            collectives,
            share.widths,
            of_draft,
        )
        slots = agree_on_slots(shape, settings, device, collectives)
        backend = backend_of(device)
        (spare,) = smallest((spare_cores(settings),), device, collectives)
        room = (slots.host, slots.disk, shape.bytes_per_spilled_block, settings.kv_disk_directory)
        spill = backend.spill(room, device, beside=spare > 0)
        files = MappedFiles(settings.kv_disk_directory) if shape.is_mapped else None
        store = KvStore(shape, blocks.writable, device, blocks.quantized, blocks.all_slots, files=files)
        window = mapped_window(shape, context) if files is not None else 0
        if files is not None and backend.disk_rate is not None:
            log.info(
                "kv_blocks_mapped",
                directory=str(settings.kv_disk_directory or tempfile.gettempdir()),
                file_bytes=files.nbytes,
                memory_bytes=store.nbytes,
                window_bytes=window,
                disk_rate=round(backend.disk_rate(files.files[0])),
            )
        store.blocks_per_snapshot = blocks_of_a_snapshot(shape, device, collectives)
        behind = len(page_layers(of_draft))
        own_store = store.part(0, shape.num_layers - behind, slots=True) if behind else store
        return cls(shape, blocks, slots, store, own_store, spill, window)

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of an `EngineSpec`."""
        return {
            "num_quantized": self.blocks.quantized,
            "num_host": self.slots.host,
            "num_disk": self.slots.disk,
            "copies_per_step": self.slots.copies_per_step,
            "kv_block_bytes": self.shape.bytes_per_spilled_block,
            "kv_bytes": self.store.nbytes + self.window,
            "num_states": self.blocks.slots,
            "draft_states": self.blocks.draft_slots,
            "state_blocks": self.store.blocks_per_snapshot,
        }

    def recover(
        self, settings: ExecutorSettings, models: list[Path], numerics: str, collectives: Collectives
    ) -> list[SpilledBlock]:
        """What all ranks have on disk from before they started, where a directory is set: slots are kept there from
        now on. `models`: directories of all that writes to blocks; `numerics`: `EngineSpec.numerics`."""
        disk, directory = self.spill.disk, settings.kv_disk_directory
        if disk is None or directory is None:
            return []
        place = SpillPlace(
            directory,
            collectives.rank,
            collectives.world_size,
            spill_fingerprint(settings, models, f"{numerics} {self.shape.format}", collectives.rank),
            settings.block_size,
            self.shape.bytes_per_spilled_block,
            self.slots.disk,
        )
        file, blocks = recover(place, self.store.device, collectives)
        if file is not None:
            disk.keep_in(file, blocks)
        return [SpilledBlock(self.slots.host + block.slot, block.key) for block in blocks]


def spill_fingerprint(settings: ExecutorSettings, models: list[Path], computed: str, rank: int) -> bytes:
    """32 bytes: of all that the bytes of `rank`'s blocks depend on, and the names of their prefixes. `computed`: how,
    and in which form. A new version of this program counts as another way to compute."""
    parts = [VERSION, served_name(settings), computed, rank, *numeric_settings(settings)]
    return hashlib.sha256(repr([*parts, *map(files_stamp, models)]).encode()).digest()
