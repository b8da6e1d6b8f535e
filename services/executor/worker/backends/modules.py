"""The backend of every platform that has none of its own, and what others fall back on: the model's own modules as
transformers has them, computed by PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings, spare_cores
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits, StepPlan
from services.executor.kv_cache.block_memory import MappedBlockFile
from services.executor.kv_cache.capacity import SpillCounts, smallest
from services.executor.kv_cache.offload import Spill, SpillStore
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.quantizing import codec_of
from services.executor.model.weight_formats import WeightCodec
from services.executor.worker.backends.base import Backend, HeadReader, RunnerRequest
from services.executor.worker.backends.built_share import BuiltShare
from services.executor.worker.runner import ModelRunner, widths_of
from services.executor.worker.weights import Share, ShareRequest
from shared.data_types import WeightDType
from shared.errors import ConfigurationError


class Modules(Backend):
    platform = ""
    packs_weights = False
    disk_rate: Callable[[MappedBlockFile], float] | None = None

    def load_share(self, request: ShareRequest) -> Share:
        if request.settings.weights_memory:
            raise ConfigurationError(
                "--weights-memory needs Linux, a CPU with native kernels (docs/performance.md) and a weight cache "
                "(RYZANSTEIN_WEIGHT_CACHE_BYTES above 0), whose file the other weights are read from; leave it out."
            )
        return BuiltShare(request, self)

    def weight_codec(self, kind: WeightDType, device: torch.device, dtype: torch.dtype) -> WeightCodec | None:
        return codec_of(kind)

    def pack(self, model: Any, device: torch.device) -> None:
        return

    def reads_compressed(
        self, model: Any, dtype: torch.dtype, collectives: Collectives, device: torch.device, threads: int
    ) -> bool:
        return False

    def runner(self, request: RunnerRequest) -> ModelRunner:
        # With transformers, which has built the model.
        from services.executor.model.loading.loader import pack_linears
        from services.executor.model.products import use_products

        model = request.model
        pack_linears(model)
        use_products(model)
        return ModelRunner(
            model, widths_of(model), request.store, request.collectives, request.device, request.spill
        )

    def head_runner(self, request: RunnerRequest) -> tuple[ModelRunner, HeadReader]:
        return Modules.runner(self, request), request.model  # kernels for models alone compute none

    def step_limits(self, settings: ExecutorSettings, context: int, *, drafts: bool) -> StepLimits | None:
        return None

    def rehearsal(self, layout: ShardLayout, store: KvStore, limits: StepLimits) -> list[StepPlan]:
        return []

    def spill(
        self,
        shape: StoreShape,
        slots: SpillCounts,
        settings: ExecutorSettings,
        device: torch.device,
        collectives: Collectives,
    ) -> Spill:
        (spare,) = smallest((spare_cores(settings),), device, collectives)
        room = (slots.host, slots.disk, shape.bytes_per_spilled_block, settings.kv_disk_directory)
        return SpillStore(*room, beside=spare > 0)
