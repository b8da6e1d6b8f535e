"""The interface of backends, which load, keep and compute a rank's share of a model; and what they fall back on, which
is all that some platforms have: the model's own modules as transformers has them, computed by PyTorch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings, cores_of, thread_count
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits, StepPlan
from services.executor.kv_cache.block_memory import MappedBlockFile
from services.executor.kv_cache.capacity import widths_of
from services.executor.kv_cache.offload import Spill, SpillStore
from services.executor.kv_cache.store import KvStore
from services.executor.model.dtypes import choose_dtype, precision, pytorch_dtype
from services.executor.model.model_facts import facts_of
from services.executor.model.quantizing import codec_of
from services.executor.model.weight_formats import WeightCodec
from services.executor.worker.runner import ModelRunner
from services.executor.worker.runner import widths_of as vocabulary_widths
from services.executor.worker.weights import Share, ShareRequest, context_of
from shared.data_types import WeightDType
from shared.errors import ConfigurationError
from shared.process import give_back
from shared.service.logs import adopt_loggers


class RunnerRequest(NamedTuple):
    model: Any  # loaded and not packed
    store: KvStore
    layout: ShardLayout
    collectives: Collectives
    device: torch.device
    threads: int  # of the kernels
    spill: Spill | None = None
    cpus: Sequence[int] = ()  # the cores to keep them on, one each; none: any
    # Of steps that a device computes beside the host; None: each is launched kernel by kernel and waited for.
    limits: StepLimits | None = None
    beside: ModelRunner | None = None  # what never computes at the same time, on the same threads


class HeadReader(Protocol):
    """What a draft head is handed states with; see `model.draft_heads.HeadModel`."""

    hidden: int

    @property
    def made(self) -> Tensor: ...

    def taken(self, states: Tensor) -> Tensor: ...

    def reading(self, states: Tensor) -> AbstractContextManager[None]: ...


# Slots in host memory and on disk, bytes of a block, and the directory on that disk; None: the system's for files
# that nobody keeps.
SpillRoom = tuple[int, int, int, Path | None]


class Backend:
    platform = ""  # the name of the one whose devices it computes on (`platforms/`)
    packs_weights = False  # whether `runner` packs weights where `reads_compressed`, which takes a while
    # Bytes a second that it reads of KV blocks in a file; None: it reads none there.
    disk_rate: Callable[[MappedBlockFile], float] | None = None

    def load_share(self, request: ShareRequest) -> Share:
        """Raises `ModelLoadError` and `ConfigurationError`: one sentence with the remedy."""
        if request.settings.weights_memory:
            raise ConfigurationError(
                "--weights-memory needs Linux, a CPU with native kernels (docs/performance.md) and a weight cache "
                "(RYZANSTEIN_WEIGHT_CACHE_BYTES above 0), whose file the other weights are read from; leave it out."
            )
        return BuiltShare(request, self)

    def weight_codec(self, kind: WeightDType, device: torch.device, dtype: torch.dtype) -> WeightCodec | None:
        """How weights of linear layers, computed in `dtype`, are kept; None: as they are computed with. Raises
        `ConfigurationError` where `device` cannot multiply by such weights."""
        return codec_of(kind)

    def pack(self, model: Any, device: torch.device) -> None:
        """Has the quantized weights of `model`, loaded, lie as kernels read them, before the KV cache takes memory."""

    def reads_compressed(self, model: Any, dtype: torch.dtype, collectives: Collectives, threads: int) -> bool:
        """Whether it computes this model by kernels of its own, and reads compressed KV blocks as fast as others;
        alike on every rank."""
        return False

    def multiplies_codes(self) -> bool:
        """Whether `use_products` leaves the codes of weights packed."""
        return False

    def use_products(self, request: RunnerRequest) -> None:
        """Has the quantized weights of a model that PyTorch runs multiplied by."""
        from services.executor.model.products import use_products

        use_products(request.model)

    def runner(self, request: RunnerRequest) -> ModelRunner:
        """The log says why where kernels of its own do not compute the model."""
        # With transformers, which has built the model.
        from services.executor.model.loading.loader import LOADING, pack_linears

        model, store, _, collectives, device, *_ = request
        pack_linears(model)
        with LOADING:  # where ranks are threads, another one may be building a model
            self.use_products(request)
        return ModelRunner(model, vocabulary_widths(model), store, collectives, device, request.spill)

    def head_runner(self, request: RunnerRequest) -> tuple[ModelRunner, HeadReader]:
        """Of a draft head (`model/draft_heads.py`), and what is handed the states that it reads."""
        return Backend.runner(self, request), request.model  # the kernels for models compute none

    def step_limits(self, settings: ExecutorSettings, context: int, *, drafts: bool) -> StepLimits | None:
        """Of steps of sequences of up to `context` tokens, which a draft model may compute, too; None where the host
        waits for all steps. Raises `ConfigurationError`."""
        return None

    def rehearsal(self, layout: ShardLayout, store: KvStore, limits: StepLimits) -> list[StepPlan]:
        """Steps that compile what requests will need."""
        return []

    def spill(self, room: SpillRoom, device: torch.device, *, beside: bool) -> Spill:
        """Where evicted KV blocks go; `beside`: whether cores are left that copy while a step computes. Raises
        `ConfigurationError`."""
        return SpillStore(*room, beside=beside)


class BuiltShare(Share):
    """Of the checkpoint. What builds is imported when something is built."""

    def __init__(self, request: ShareRequest, backend: "Backend") -> None:
        from services.executor.model.catalogue import check_supported, longest_context
        from services.executor.model.layer_states import layer_states
        from services.executor.model.loading.loader import keeps_codes, load_config, load_model, unpack
        from services.executor.model.rotary import rotary_scaling

        adopt_loggers()  # of transformers
        settings, spec, directory, device, collectives, report, _ = request
        config = load_config(directory)
        check_supported(config)
        self.layout = ShardLayout.from_config(config, spec.world_size, spec.rank)
        self.dtype = choose_dtype(settings, device, config, collectives)
        codec = backend.weight_codec(settings.weight_dtype, device, self.dtype)
        self._threads, self._cores = thread_count(settings), cores_of(settings, spec.rank)
        rounds = precision(settings.dtype, getattr(config, "dtype", None)) is torch.bfloat16
        multiplies = rounds and (self.dtype is torch.bfloat16 or backend.multiplies_codes())
        keep_codes = keeps_codes(settings.weight_dtype, config) and multiplies
        self.widths = widths_of(config, spec.world_size)
        states = layer_states(config, self.layout)
        rotary = rotary_scaling(config)
        context = context_of(settings, longest_context(config), rotary.longest)
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
            before_reading=partial(request.check_room, states, self.dtype, context, self.widths),
            context=context,
            quantizes_experts=multiplies,
        )
        self._backend, self._device, self._collectives = backend, device, collectives
        self.reads_compressed = backend.reads_compressed(self._model, self.dtype, collectives, self._threads)
        if keep_codes and not (self.reads_compressed or backend.multiplies_codes()):
            unpack(self._model, self.dtype, device)
        else:
            backend.pack(self._model, device)
        computed = self.dtype if self.reads_compressed else pytorch_dtype(self.dtype, device, collectives)
        if computed is not self.dtype:
            self._model.to(computed)  # PyTorch computes it after all
            self.dtype = computed
        self.facts = facts_of(self._model, config, self.layout, context)
        self._module = type(self._model).__module__

    def runner(
        self, store: KvStore, spill: Spill, limits: StepLimits | None, beside: ModelRunner | None = None
    ) -> ModelRunner:
        model, self._model = self._model, None
        where = (self.layout, self._collectives, self._device, self._threads)
        runner = self._backend.runner(RunnerRequest(model, store, *where, spill, self._cores, limits, beside))
        give_back()  # what reading and packing took
        return runner

    @property
    def imports(self) -> list[str]:
        return ["services.executor.model.loading.loader", self._module]
