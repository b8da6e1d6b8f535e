"""A runner around the native kernels for CPUs, where the model and the CPU suit them."""

from typing import Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.collectives.shared_memory import SharedMemory
from services.executor.cpu.decoder import NativeDecoder
from services.executor.cpu.packed_model import PackedModel, lower
from services.executor.cpu.weight_streaming import WeightStreamer
from services.executor.model.lowering import CannotLower, Lowered
from services.executor.native.library import load_library, why_not
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.runner import ModelRunner

log = structlog.get_logger(__name__)


def native_runner(
    packed: PackedModel, widths: list[int], request: RunnerRequest, weights: str, streamer: WeightStreamer | None = None
) -> ModelRunner:
    """Of a packed model, where `native_kernels` may compute. `widths`: as of `widths_of`; `weights`: where they come
    from, for the log; `streamer`: of what is not in memory."""
    model, store, layout, collectives, device, threads, spill, cpus, _, beside = request
    library, ring = native_kernels(collectives, threads)
    log.info(
        "computing_with_native_kernels",
        cpu_level=library.level,
        threads=threads,
        cores=list(cpus) or "any",
        weights=weights,
    )
    other = None if beside is None else beside.native
    assert other is None or isinstance(other, NativeDecoder), "a backend's runners are of one kind"
    decoder = NativeDecoder(library, packed, store, layout, threads, ring, cpus, other, streamer)
    kernels = f"native {decoder.level}"
    return ModelRunner(model, widths, store, collectives, device, spill, decoder, kernels=kernels)


def lower_natively(model: Any, dtype: torch.dtype, collectives: Collectives, threads: int) -> tuple[Any, Lowered]:
    """The library, and `model`, loaded, as it takes it. Raises `CannotLower` with the reason."""
    library, _ = native_kernels(collectives, threads)
    return library, lower(model, dtype, collectives.world_size)


def native_kernels(collectives: Collectives, threads: int) -> tuple[Any, SharedMemory | None]:
    """The library, and what sums over the ranks. Raises `CannotLower` where they compute for no model at all."""
    library = load_library()
    if library is None:
        raise CannotLower(why_not())
    if collectives.world_size == 1:
        return library, None
    if not isinstance(collectives, SharedMemory) or collectives.lanes < threads:
        raise CannotLower("the ranks do not share memory")
    return library, collectives
