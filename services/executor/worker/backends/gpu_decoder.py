"""GPUs with Triton: our decoder where the model can be lowered, else transformers' modules, attending with Triton."""

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits, StepPlan
from services.executor.gpu.linear import pack_for_gpu, use_products, weight_codec
from services.executor.gpu.offload import DeviceSpill
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model import lowering
from services.executor.model.lowering import CannotLower, Lowered
from services.executor.model.weight_formats import WeightCodec
from services.executor.platforms.catalog import platform_of
from services.executor.worker.backends.base import Backend, HeadReader, RunnerRequest, SpillRoom
from services.executor.worker.runner import ModelRunner, widths_of
from shared.data_types import WeightDType
from shared.errors import ConfigurationError, ModelLoadError, reason_of

if TYPE_CHECKING:  # they import Triton
    from services.executor.gpu.graphs import Capture

log = structlog.get_logger(__name__)


class GpuDecoding(Backend):
    platform = "cuda"

    def weight_codec(self, kind: WeightDType, device: torch.device, dtype: torch.dtype) -> WeightCodec | None:
        return weight_codec(kind, device, dtype)

    def pack(self, model: Any, device: torch.device) -> None:
        pack_for_gpu(model, device)

    def reads_compressed(self, model: Any, dtype: torch.dtype, collectives: Collectives, threads: int) -> bool:
        """Attention by Triton multiplies codes as they are, whatever computes the rest of the model; in fp32, which is
        asked for where rounding is not wanted, blocks are left as they are."""
        return dtype is torch.bfloat16 and has_triton()

    def runner(self, request: RunnerRequest) -> ModelRunner:
        if not has_triton():
            log.info("computing_with_pytorch", reason="there is no Triton for this GPU")
            return super().runner(request)
        model, store, layout, collectives, *_ = request
        return gpu_runner(model, store, layout, collectives, request.spill, request.limits)

    def head_runner(self, request: RunnerRequest) -> tuple[ModelRunner, HeadReader]:
        if not has_triton():
            return super().head_runner(request)
        return gpu_head_runner(request)

    def step_limits(self, settings: ExecutorSettings, context: int, *, drafts: bool) -> StepLimits | None:
        if not has_triton():
            if settings.batch_invariant:
                raise ConfigurationError(
                    "--batch-invariant needs Triton on a GPU; the log says why there is none (attending_with_pytorch)."
                )
            return None
        memory = 0 if settings.cuda_graphs == "off" else settings.cuda_graphs_memory
        memory //= 2 if drafts else 1  # a draft model has graphs of its own
        limits = (settings.max_sequences, settings.max_batch_tokens, context)
        return StepLimits(*limits, memory, settings.batch_invariant, settings.cuda_graphs == "all")

    def rehearsal(self, layout: ShardLayout, store: KvStore, limits: StepLimits) -> list[StepPlan]:
        from services.executor.gpu.steps import sparse_warmups, warmup_chunks, warmup_plans

        chunks = warmup_chunks(limits.max_batch_tokens, limits.context_length, layout.q_per_kv)
        compression = (0, store.num_writable) if store.num_quantized else None
        plans = warmup_plans(chunks, store.block_size, compression)
        return plans + sparse_warmups(store.shape, limits.context_length)

    def spill(self, room: SpillRoom, device: torch.device, *, beside: bool) -> Spill:
        return DeviceSpill(*room, device)


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
    how = f"batch-invariant {_capability(store.device)}" if batch_invariant else store.device.type
    where = (model, widths, store, collectives, store.device, spill)
    if limits is None:
        return ModelRunner(*where, decoder, kernels=f"Triton {how}")
    steps = GpuSteps(decoder, store, collectives, widths, limits, capture)
    return ModelRunner(*where, steps.decoder, steps=steps, kernels=f"Triton {how}", exact=batch_invariant)


def lowered_for_gpu(model: Any, store: KvStore) -> Lowered:
    """Raises `CannotLower`."""
    lowered = lowering.lower(model, store.shape.dtype)
    if lowered.native_alone:
        raise CannotLower(f"the GPU decoder computes no {lowered.native_alone}")
    return lowered


def gpu_head_runner(request: RunnerRequest) -> tuple[ModelRunner, HeadReader]:
    """`Backend.head_runner`, where there is Triton."""
    from services.executor.gpu.draft_head import GpuHead, GraphedHead
    from services.executor.gpu.steps import GpuSteps

    head, store, layout, collectives, *_ = request
    pack_for_gpu(head, store.device)
    modules = partial(modules_on_gpu, head, store, collectives, request.spill, head.first_seen)
    if request.limits is None:
        return modules(), head
    try:
        lowered = lowered_for_gpu(head.model, store)
    except CannotLower as reason:
        log.info("computing_draft_head_with_pytorch", attending_with="Triton", reason=str(reason))
        return modules(), head
    widths = widths_of(head)
    decoder = GpuHead(head, lowered, store, layout, collectives)
    steps = GpuSteps(decoder, store, collectives, widths, request.limits)
    where = (head, widths, store, collectives, store.device, request.spill)
    runner = ModelRunner(*where, steps.decoder, steps=steps, kernels=f"Triton {store.device.type}")
    return runner, GraphedHead(decoder, steps.decoder)


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


def _capability(device: torch.device) -> str:
    """Which GPUs a kernel is compiled for as for this one."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}"


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
