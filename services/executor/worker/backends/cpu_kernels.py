"""The native kernels for CPUs, where the model and the CPU suit them."""

from collections.abc import Sequence
from typing import Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.collectives.shared_memory import SharedMemory
from services.executor.core.sharding import ShardLayout
from services.executor.cpu.decoder import NativeDecoder
from services.executor.cpu.packed_model import PackedModel, lower, pack
from services.executor.cpu.weight_streaming import WeightStreamer
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.lowering import CannotLower, Lowered
from services.executor.native.library import load_library, why_not
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.runner import ModelRunner, widths_of

log = structlog.get_logger(__name__)


class CpuKernels:
    def runner(self, request: RunnerRequest) -> ModelRunner | None:
        model, store, layout, collectives, device, threads, spill, cpus, _, beside = request
        try:
            library, ring, lowered = _lower(model, store.shape.dtype, collectives, device, threads)
        except CannotLower as reason:
            log.info("computing_with_pytorch", reason=str(reason))
            return None
        _log_native(library, threads, cpus, "packed here")
        packed = pack(library, lowered, layout, threads)
        other = None if beside is None else beside.native
        decoder = NativeDecoder(library, packed, store, layout, threads, ring, cpus, other)
        return ModelRunner(model, widths_of(model), store, collectives, device, spill, decoder)

    def reads_compressed(
        self, model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
    ) -> bool:
        """Wherever they compute."""
        try:
            _lower(model, dtype, collectives, device, threads)
        except CannotLower:
            return False
        return True


def packed_runner(
    packed: PackedModel,
    widths: list[int],
    store: KvStore,
    layout: ShardLayout,
    collectives: Collectives,
    threads: int,
    spill: Spill | None = None,
    cpus: Sequence[int] = (),
    beside: ModelRunner | None = None,
    streamer: WeightStreamer | None = None,
) -> ModelRunner:
    """A runner for a model that was packed before, where `native_kernels` may compute; `widths` as of `widths_of`,
    `beside` as of `RunnerRequest`; `streamer`: of what is not in memory."""
    library, ring = native_kernels(collectives, store.device, threads)
    _log_native(library, threads, cpus, "cached")
    other = None if beside is None else beside.native
    decoder = NativeDecoder(library, packed, store, layout, threads, ring, cpus, other, streamer)
    return ModelRunner(None, widths, store, collectives, store.device, spill, decoder)


def packed_model(
    model: Any,
    dtype: torch.dtype,
    layout: ShardLayout,
    collectives: Collectives,
    device: torch.device,
    threads: int,
) -> PackedModel:
    """`model`, loaded, as the native kernels take it; it is of no use afterwards. Raises `CannotLower`."""
    library, _, lowered = _lower(model, dtype, collectives, device, threads)
    return pack(library, lowered, layout, threads)


def _log_native(library: Any, threads: int, cpus: Sequence[int], weights: str) -> None:
    log.info(
        "computing_with_native_kernels",
        cpu_level=library.level,
        threads=threads,
        cores=list(cpus) or "any",
        weights=weights,
    )


def _lower(
    model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
) -> tuple[Any, SharedMemory | None, Lowered]:
    """All that a native decoder needs. Raises `CannotLower` with the reason."""
    library, ring = native_kernels(collectives, device, threads)
    return library, ring, lower(model, dtype, collectives.world_size)


def native_kernels(
    collectives: Collectives, device: torch.device, threads: int
) -> tuple[Any, SharedMemory | None]:
    """The library, and what sums over the ranks. Raises `CannotLower` where they compute for no model at all."""
    if device.type != "cpu":
        raise CannotLower("the native kernels are for CPUs")
    library = load_library()
    if library is None:
        raise CannotLower(why_not())
    return library, _native_ring(collectives, threads)


def _native_ring(collectives: Collectives, threads: int) -> SharedMemory | None:
    if collectives.world_size == 1:
        return None
    if not isinstance(collectives, SharedMemory) or collectives.lanes < threads:
        raise CannotLower("the ranks do not share memory")
    return collectives
