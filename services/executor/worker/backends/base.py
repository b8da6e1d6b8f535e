"""The interface of backends: what loads, keeps and computes a rank's share of a model, and for which models."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits, StepPlan
from services.executor.kv_cache.block_memory import MappedBlockFile
from services.executor.kv_cache.capacity import SpillCounts
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.weight_formats import WeightCodec
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, ShareRequest
from shared.data_types import WeightDType


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
    """Of steps that a device computes beside the host; None: each is launched kernel by kernel and waited for."""
    beside: ModelRunner | None = None
    """What never computes at the same time, on the same threads."""


class HeadReader(Protocol):
    """What a draft head is handed states with; see `model.draft_heads.HeadModel`."""

    hidden: int

    @property
    def made(self) -> Tensor: ...

    def taken(self, states: Tensor) -> Tensor: ...

    def reading(self, states: Tensor) -> AbstractContextManager[None]: ...


class Backend(Protocol):
    platform: str
    """The name of the one whose devices it computes on (`platforms/`)."""
    packs_weights: bool
    """Whether `runner` packs weights where `reads_compressed`, which takes a while."""
    disk_rate: Callable[[MappedBlockFile], float] | None
    """Bytes a second that it reads of KV blocks in a file; None: it reads none there."""

    def load_share(self, request: ShareRequest) -> Share:
        """Raises `ModelLoadError` and `ConfigurationError`: one sentence with the remedy."""
        ...

    def weight_codec(self, kind: WeightDType, device: torch.device, dtype: torch.dtype) -> WeightCodec | None:
        """How weights of linear layers, computed in `dtype`, are kept; None: as they are computed with. Raises
        `ConfigurationError` where `device` cannot multiply by such weights."""
        ...

    def pack(self, model: Any, device: torch.device) -> None:
        """Has the quantized weights of `model`, loaded, lie as kernels read them, before the KV cache takes memory."""
        ...

    def reads_compressed(
        self, model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
    ) -> bool:
        """Whether it computes this model by kernels of its own, and reads compressed KV blocks as fast as others;
        alike on every rank."""
        ...

    def runner(self, request: RunnerRequest) -> ModelRunner:
        """The log says why where kernels of its own do not compute the model."""
        ...

    def head_runner(self, request: RunnerRequest) -> tuple[ModelRunner, HeadReader]:
        """Of a draft head (`model/draft_heads.py`), and what is handed the states that it reads."""
        ...

    def step_limits(self, settings: ExecutorSettings, context: int, *, drafts: bool) -> StepLimits | None:
        """Of steps of sequences of up to `context` tokens, which a draft model may compute, too; None where the host
        waits for all steps. Raises `ConfigurationError`."""
        ...

    def rehearsal(self, layout: ShardLayout, store: KvStore, limits: StepLimits) -> list[StepPlan]:
        """Steps that compile what requests will need."""
        ...

    def spill(
        self,
        shape: StoreShape,
        slots: SpillCounts,
        settings: ExecutorSettings,
        device: torch.device,
        collectives: Collectives,
    ) -> Spill:
        """Where evicted KV blocks go. Raises `ConfigurationError`."""
        ...
