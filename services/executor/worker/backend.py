"""Decides what computes a rank's steps, and says so in the log.

CPU                native kernels where the model and the CPU suit them, else PyTorch
GPU with Triton    our decoder where the model can be lowered, else transformers' modules, attending with Triton
GPU without        PyTorch
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.collectives.shared_memory import SharedMemory
from services.executor.core.sharding import ShardLayout
from services.executor.cpu.decoder import NativeDecoder
from services.executor.cpu.packed_model import PackedModel, lower, pack
from services.executor.cpu.weight_streaming import WeightStreamer
from services.executor.gpu.linear import pack_for_gpu, use_products
from services.executor.kv_cache.capacity import give_back
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model import lowering
from services.executor.model.lowering import CannotLower, Lowered
from services.executor.native.library import load_library, why_not
from services.executor.worker.runner import ModelRunner, widths_of
from shared.errors import ModelLoadError, reason_of

if TYPE_CHECKING:  # they import Triton, which not every host has
    from services.executor.gpu.graphs import Capture
    from services.executor.gpu.steps import StepLimits

log = structlog.get_logger(__name__)


def make_runner(
    model: Any,
    store: KvStore,
    layout: ShardLayout,
    collectives: Collectives,
    device: torch.device,
    threads: int,
    spill: Spill | None = None,
    cpus: Sequence[int] = (),
    limits: "StepLimits | None" = None,
    beside: ModelRunner | None = None,
) -> ModelRunner:
    """A runner for `model`, which is loaded and not packed. `threads`: of the kernels; `cpus`: the cores to keep
    them on, one each; none: any. `limits`: of a GPU's steps; None: each is launched kernel by kernel and waited for.
    `beside`: what never computes at the same time, on the same threads."""
    if device.type == "cuda" and has_triton():
        return gpu_runner(model, store, layout, collectives, spill, limits)
    decoder = _native_decoder(model, store, layout, collectives, device, threads, cpus, beside)
    if decoder is None:
        return module_runner(model, store, collectives, spill)
    return ModelRunner(model, widths_of(model), store, collectives, device, spill, decoder)


def module_runner(
    model: Any, store: KvStore, collectives: Collectives, spill: Spill | None = None, first_seen: int = 0
) -> ModelRunner:
    """A runner for `model`, loaded and not packed, whose own modules compute. `first_seen`: what it sets of the steps'
    `StepContext`."""
    device = store.device
    if device.type == "cuda" and has_triton():
        pack_for_gpu(model, device)
        return modules_on_gpu(model, store, collectives, spill, first_seen)
    # With transformers, which has built the model.
    from services.executor.model.loading.loader import pack_linears

    pack_linears(model)
    use_products(model)
    return ModelRunner(model, widths_of(model), store, collectives, device, spill)


def lowered_for_gpu(model: Any, store: KvStore) -> Lowered:
    """Raises `CannotLower`."""
    lowered = lowering.lower(model, store.shape.dtype)
    if lowered.native_alone:
        raise CannotLower(f"the GPU decoder computes no {lowered.native_alone}")
    return lowered


def modules_on_gpu(
    model: Any, store: KvStore, collectives: Collectives, spill: Spill | None, first_seen: int = 0
) -> ModelRunner:
    from services.executor.gpu.attention import GpuKernels
    from services.executor.gpu.experts import use_expert_kernels

    use_expert_kernels(model, store.device)
    use_products(model)
    # The kernels read page layers of one shape; others are PyTorch's to attend to.
    attention = GpuKernels(store, first_seen) if store.shape.is_uniform else None
    return ModelRunner(model, widths_of(model), store, collectives, store.device, spill, attention=attention)


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
    `beside` as of `make_runner`; `streamer`: of what is not in memory."""
    library, ring = native_kernels(collectives, store.device, threads)
    _log_native(library, threads, cpus, "cached")
    other = None if beside is None else beside.native
    decoder = NativeDecoder(library, packed, store, layout, threads, ring, cpus, other, streamer)
    return ModelRunner(None, widths, store, collectives, store.device, spill, decoder)


def gpu_runner(
    model: Any,
    store: KvStore,
    layout: ShardLayout,
    collectives: Collectives,
    spill: Spill | None = None,
    limits: "StepLimits | None" = None,
    capture: "Capture | None" = None,
) -> ModelRunner:
    """A runner for `model`, loaded, on the GPU of `store`, where there is Triton: its decoder where the model can be
    lowered, else the model's own code with its attention. `capture` makes graphs in place of CUDA."""
    from services.executor.gpu.decoder import GpuDecoder
    from services.executor.gpu.steps import GpuSteps

    pack_for_gpu(model, store.device)
    batch_invariant = limits is not None and limits.batch_invariant
    try:
        lowered = lowered_for_gpu(model, store)
    except CannotLower as reason:
        if batch_invariant:
            raise ModelLoadError(
                f"--batch-invariant is for models that the GPU decoder computes, not this one ({reason}); leave it out."
            ) from None
        log.info("computing_with_pytorch", attending_with="Triton", reason=str(reason))
        return modules_on_gpu(model, store, collectives, spill)
    log.info("computing_with_gpu_decoder", layers=len(lowered.layers))
    decoder = GpuDecoder(lowered, store, layout, collectives, batch_invariant=batch_invariant)
    give_back(store.device)  # weights that were joined leave pieces behind, in which no joined one finds room
    widths = widths_of(model)
    if limits is None:
        return ModelRunner(model, widths, store, collectives, store.device, spill, decoder)
    steps = GpuSteps(decoder, store, collectives, widths, limits, capture)
    return ModelRunner(
        model,
        widths,
        store,
        collectives,
        store.device,
        spill,
        steps.decoder,
        steps=steps,
        batch_invariant=batch_invariant,
    )


@cache
def has_triton() -> bool:
    """Whether Triton is there, which comes with PyTorch for CUDA, and can launch kernels on this process's GPU; says
    once in the log where it is not."""
    reason = _why_no_triton()
    if reason:
        log.warning("attending_with_pytorch", reason=reason)
    return not reason


def _why_no_triton() -> str:
    try:
        import triton
        from triton import knobs
    except ImportError as error:
        return f"Triton cannot be imported ({error}); install it with torch"
    if knobs.runtime.interpret:
        return ""
    try:
        # Builds its own library for the driver where its cache has none, with a C compiler and Python's headers.
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of a compiler, a linker, a file system that forbids to execute
        return (
            f"Triton cannot build what launches its kernels ({reason_of(error)}); install a C compiler and Python's "
            "headers, and let TRITON_CACHE_DIR be where files may be executed"
        )
    return ""


def reads_compressed(
    model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
) -> bool:
    """Whether what `make_runner` will choose reads compressed KV blocks as fast as others; alike on every rank.

    The native kernels do. So does attention by Triton, which multiplies codes as they are, whatever computes the rest
    of the model; in fp32, which is asked for where rounding is not wanted, blocks are left as they are.
    """
    if device.type == "cuda":
        return dtype is torch.bfloat16 and has_triton()
    return computes_natively(model, dtype, collectives, device, threads)


def computes_natively(
    model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
) -> bool:
    """Whether `make_runner` will choose the native kernels for CPUs; alike on every rank."""
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
    beside: ModelRunner | None,
) -> NativeDecoder | None:
    try:
        library, ring, lowered = _lower(model, store.shape.dtype, collectives, device, threads)
    except CannotLower as reason:
        log.info("computing_with_pytorch", reason=str(reason))
        return None
    _log_native(library, threads, cpus, "packed here")
    packed = pack(library, lowered, layout, threads)
    other = None if beside is None else beside.native
    return NativeDecoder(library, packed, store, layout, threads, ring, cpus, other)


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
