"""The interface of backends: what a runner is made of, and for which models."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.worker.runner import ModelRunner


class RunnerRequest(NamedTuple):
    model: Any
    """Loaded and not packed."""
    store: KvStore
    layout: ShardLayout
    collectives: Collectives
    device: torch.device
    threads: int
    """Of the kernels."""
    spill: Spill | None = None
    cpus: Sequence[int] = ()
    """The cores to keep them on, one each; none: any."""
    limits: StepLimits | None = None
    """Of a GPU's steps; None: each is launched kernel by kernel and waited for."""
    beside: ModelRunner | None = None
    """What never computes at the same time, on the same threads."""


class Backend(Protocol):
    def runner(self, request: RunnerRequest) -> ModelRunner | None:
        """None where it does not compute this model here; the log says why, where that is worth knowing."""
        ...

    def reads_compressed(
        self, model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
    ) -> bool:
        """Whether it would compute this model, and reads compressed KV blocks as fast as others; alike on every
        rank."""
        ...
