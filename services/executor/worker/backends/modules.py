"""The model's own modules as transformers has them, attending with Triton on GPUs that have it, else with PyTorch."""

from functools import cache
from typing import Any

import structlog

from services.executor.collectives.base import Collectives
from services.executor.gpu.linear import pack_for_gpu, use_products
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.worker.runner import ModelRunner, widths_of
from shared.errors import reason_of

log = structlog.get_logger(__name__)


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
