"""CPUs: the native kernels where the model and the CPU suit them, else PyTorch."""

import os
from typing import Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.cpu.block_fetching import measure_disk
from services.executor.cpu.module_products import use_native_products
from services.executor.cpu.packed_model import pack
from services.executor.model.lowering import CannotLower
from services.executor.native.library import load_library
from services.executor.worker.backends.base import Backend, RunnerRequest
from services.executor.worker.backends.native_runner import lower_natively, native_runner
from services.executor.worker.backends.packed_share import cache_of, load_packed
from services.executor.worker.runner import ModelRunner, widths_of
from services.executor.worker.weights import Share, ShareRequest

log = structlog.get_logger(__name__)


class CpuKernels(Backend):
    platform = "cpu"
    packs_weights = True
    disk_rate = staticmethod(measure_disk)

    def load_share(self, request: ShareRequest) -> Share:
        cache = cache_of(request)
        if cache is None or (request.settings.weights_memory and not hasattr(os, "eventfd")):
            return super().load_share(request)
        return load_packed(request, self, cache)

    def reads_compressed(self, model: Any, dtype: torch.dtype, collectives: Collectives, threads: int) -> bool:
        """Wherever they compute."""
        try:
            lower_natively(model, dtype, collectives, threads)
        except CannotLower:
            return False
        return True

    def multiplies_codes(self) -> bool:
        return load_library() is not None

    def use_products(self, request: RunnerRequest) -> None:
        library = load_library()
        if library is None:
            super().use_products(request)
        else:
            use_native_products(request.model, library, request.threads, request.cpus)

    def runner(self, request: RunnerRequest) -> ModelRunner:
        model, store, layout, collectives, _, threads, *_ = request
        try:
            library, lowered = lower_natively(model, store.dtype, collectives, threads)
        except CannotLower as reason:
            log.info("computing_with_pytorch", reason=str(reason))
            return super().runner(request)
        packed = pack(library, lowered, layout, threads)
        return native_runner(packed, widths_of(model), request, "packed here")
