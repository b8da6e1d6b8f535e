"""Decides what computes a rank's steps, and says so in the log: the first of the backends that does (`backends/`)."""

from typing import Any

import torch

from services.executor.collectives.base import Collectives
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.catalog import BACKENDS
from services.executor.worker.backends.modules import module_runner
from services.executor.worker.runner import ModelRunner


def make_runner(request: RunnerRequest) -> ModelRunner:
    for backend in BACKENDS:
        if (runner := backend.runner(request)) is not None:
            return runner
    return module_runner(request.model, request.store, request.collectives, request.spill)


def reads_compressed(
    model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
) -> bool:
    """Whether what `make_runner` will choose reads compressed KV blocks as fast as others; alike on every rank."""
    return any(backend.reads_compressed(model, dtype, collectives, device, threads) for backend in BACKENDS)
