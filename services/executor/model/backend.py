"""Decides what computes a rank's steps: the native kernels where they can, else PyTorch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import structlog
import torch

from services.executor.gpu.products import use_products
from services.executor.kv_cache.spill import SpillStore
from services.executor.kv_cache.store import KvStore
from services.executor.model.collectives import Collectives
from services.executor.model.collectives_shm import SharedMemory
from services.executor.model.loader import pack_linears
from services.executor.model.runner import ModelRunner
from services.executor.model.sharding import ShardLayout
from services.executor.native.decoder import NativeDecoder, NativeRing
from services.executor.native.library import load_library, why_not
from services.executor.native.lowering import CannotLower, Lowered, lower

if TYPE_CHECKING:  # it imports Triton, which not every host has
    from services.executor.triton_kernels.backend import GpuKernels

log = structlog.get_logger(__name__)


def make_runner(
    model: Any,
    store: KvStore,
    layout: ShardLayout,
    collectives: Collectives,
    device: torch.device,
    threads: int,
    spill: SpillStore | None = None,
    cpus: Sequence[int] = (),
) -> ModelRunner:
    """A runner for `model`, which is loaded and not packed. `threads`: of the kernels; `cpus`: the cores to keep
    them on, one each; none: any."""
    decoder = _native_decoder(model, store, layout, collectives, device, threads, cpus)
    if decoder is None:
        pack_linears(model)
        use_products(model)
    else:
        store.compressor = decoder.compress
    return ModelRunner(model, store, collectives, device, spill, decoder, gpu_kernels(store))


def gpu_kernels(store: KvStore) -> "GpuKernels | None":
    """The Triton kernels where the store is on a GPU and Triton is there; it comes with PyTorch for CUDA."""
    if store.device.type != "cuda":
        return None
    try:
        from services.executor.triton_kernels.backend import GpuKernels
    except ImportError as error:
        log.warning(
            "attending_with_pytorch", reason=f"Triton cannot be imported ({error}); install it with torch"
        )
        return None
    return GpuKernels(store)


def computes_natively(
    model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
) -> bool:
    """Whether `make_runner` will choose the native kernels; alike on every rank."""
    try:
        _lower(model, dtype, collectives, device, threads)
    except CannotLower:
        return False
    return True


def _native_decoder(
    model: Any,
    store: KvStore,
    layout: ShardLayout,
    collectives: Collectives,
    device: torch.device,
    threads: int,
    cpus: Sequence[int],
) -> NativeDecoder | None:
    try:
        library, ring, lowered = _lower(model, store.shape.dtype, collectives, device, threads)
    except CannotLower as reason:
        log.info("computing_with_pytorch", reason=str(reason))
        return None
    log.info("computing_with_native_kernels", threads=threads, cores=list(cpus) or "any")
    return NativeDecoder(library, lowered, store, layout, threads, ring, cpus)


def _lower(
    model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
) -> tuple[Any, NativeRing | None, Lowered]:
    """All that a native decoder needs. Raises `CannotLower` with the reason."""
    if device.type != "cpu":
        raise CannotLower("the native kernels are for CPUs")
    library = load_library()
    if library is None:
        raise CannotLower(why_not())
    return library, _native_ring(collectives, threads), lower(model, dtype, collectives.world_size)


def _native_ring(collectives: Collectives, threads: int) -> NativeRing | None:
    if collectives.world_size == 1:
        return None
    if not isinstance(collectives, SharedMemory) or collectives.lanes < threads:
        raise CannotLower("the ranks do not share memory")
    return NativeRing(collectives.handle, collectives.timeout_ns)
