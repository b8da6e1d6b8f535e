"""One rank's share of a model, read from its checkpoint."""

from functools import partial
from typing import Any

import torch

from services.executor.core.settings import cores_of, thread_count
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.kv_cache.capacity import widths_of
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.dtypes import choose_dtype
from services.executor.model.model_facts import facts_of
from services.executor.platforms.catalog import platform_of
from services.executor.worker.backends.base import Backend, RunnerRequest
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, ShareRequest, context_of
from shared.process import give_back
from shared.service.logs import adopt_loggers


class BuiltShare(Share):
    """What builds is imported when something is built."""

    def __init__(self, request: ShareRequest, backend: Backend) -> None:
        from services.executor.model.catalogue import check_supported
        from services.executor.model.layer_states import layer_states
        from services.executor.model.loading.loader import (
            context_length,
            keeps_codes,
            load_config,
            load_model,
            unpack,
        )
        from services.executor.model.rotary import rotary_scaling

        adopt_loggers()  # of transformers
        settings, spec, directory, device, collectives, report, has_room = request
        config = load_config(directory)
        check_supported(config)
        self.layout = ShardLayout.from_config(config, spec.world_size, spec.rank)
        self.dtype = choose_dtype(settings, device, config)
        codec = backend.weight_codec(settings.weight_dtype, device, self.dtype)
        self._threads, self._cores = thread_count(settings), cores_of(settings, spec.rank)
        keep_codes = keeps_codes(settings.weight_dtype, config) and self.dtype is torch.bfloat16
        self.widths = widths_of(config, spec.world_size)
        states = layer_states(config, self.layout)
        rotary = rotary_scaling(config)
        context = context_of(settings, context_length(config), rotary.longest)
        self._model: Any = load_model(
            directory,
            self.dtype,
            self.layout,
            collectives,
            device,
            report,
            codec,
            keep_codes=keep_codes,
            defer_codes=keep_codes,
            before_reading=partial(has_room, states, self.dtype, context, self.widths),
            context=context,
        )
        self._backend, self._device, self._collectives = backend, device, collectives
        how = (self.dtype, collectives, device, self._threads)
        self.reads_compressed = backend.reads_compressed(self._model, *how)
        if keep_codes and not self.reads_compressed:
            unpack(self._model, self.dtype, device)
        else:
            backend.pack(self._model, device)
        if settings.dtype == "auto" and not self.reads_compressed and not platform_of(device).has_fast_bf16():
            self._model.float()  # PyTorch computes it after all
            self.dtype = torch.float32
        self.facts = facts_of(self._model, config, self.layout, context)
        self._module = type(self._model).__module__

    def runner(
        self,
        store: KvStore,
        spill: Spill,
        limits: StepLimits | None,
        beside: ModelRunner | None = None,
    ) -> ModelRunner:
        model, self._model = self._model, None
        where = (self.layout, self._collectives, self._device, self._threads)
        runner = self._backend.runner(RunnerRequest(model, store, *where, spill, self._cores, limits, beside))
        give_back()  # what reading and packing took
        return runner

    @property
    def imports(self) -> list[str]:
        return ["services.executor.model.loading.loader", self._module]
