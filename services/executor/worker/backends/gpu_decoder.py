"""GPUs with Triton: our decoder where the model can be lowered, else transformers' modules, attending with Triton."""

from typing import TYPE_CHECKING, Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.gpu.linear import pack_for_gpu
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model import lowering
from services.executor.model.lowering import CannotLower, Lowered
from services.executor.platforms.catalog import platform_of
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.modules import has_triton, modules_on_gpu
from services.executor.worker.runner import ModelRunner, widths_of
from shared.errors import ModelLoadError

if TYPE_CHECKING:  # they import Triton
    from services.executor.gpu.graphs import Capture

log = structlog.get_logger(__name__)


class GpuDecoding:
    def runner(self, request: RunnerRequest) -> ModelRunner | None:
        if request.device.type != "cuda" or not has_triton():
            return None
        model, store, layout, collectives, *_ = request
        return gpu_runner(model, store, layout, collectives, request.spill, request.limits)

    def reads_compressed(
        self, model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
    ) -> bool:
        """Attention by Triton multiplies codes as they are, whatever computes the rest of the model; in fp32, which is
        asked for where rounding is not wanted, blocks are left as they are."""
        return device.type == "cuda" and dtype is torch.bfloat16 and has_triton()


def gpu_runner(
    model: Any,
    store: KvStore,
    layout: ShardLayout,
    collectives: Collectives,
    spill: Spill | None = None,
    limits: StepLimits | None = None,
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
    # Weights that were joined leave pieces behind, in which no joined one finds room.
    platform_of(store.device).give_back(store.device)
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


def lowered_for_gpu(model: Any, store: KvStore) -> Lowered:
    """Raises `CannotLower`."""
    lowered = lowering.lower(model, store.shape.dtype)
    if lowered.native_alone:
        raise CannotLower(f"the GPU decoder computes no {lowered.native_alone}")
    return lowered
