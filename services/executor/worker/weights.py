"""One rank's share of a model in memory, before its KV cache is made: read from the weight cache, or built.

A share that is read needs neither transformers nor the checkpoint: what builds is imported when something is built.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.layer_state import LayerStates
from services.executor.core.settings import (
    ExecutorSettings,
    cores_of,
    packed_directory,
    packed_share,
    thread_count,
)
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.cpu.packed_file import PackedFile
from services.executor.cpu.packed_model import PackedModel
from services.executor.cpu.weight_cache import CachedWeights, WeightCache
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.capacity import StepWidths, check_room, smallest, widths_of
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.dtypes import choose_dtype
from services.executor.model.loading.arena import in_files
from services.executor.model.lowering import CannotLower
from services.executor.model.model_facts import ModelFacts, facts_of
from services.executor.native.library import choose_level
from services.executor.platforms.catalog import platform_of
from services.executor.worker.backend import make_runner, reads_compressed
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.cpu_kernels import native_kernels, packed_model, packed_runner
from services.executor.worker.runner import ModelRunner
from shared.errors import ConfigurationError, RyzansteinError
from shared.messages import StreamedWeights
from shared.process import give_back
from shared.service.logs import adopt_loggers

log = structlog.get_logger(__name__)

KEEP_TIMEOUT = 4.0
"""Seconds that a rank which ends waits for its weights to be kept; its supervisor waits for `LEAVE_TIMEOUT`."""
Report = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Share:
    """A rank's weights."""

    is_cached = False
    """Whether an earlier start has kept them, which had checked the model's other files too."""
    facts: ModelFacts
    layout: ShardLayout
    dtype: torch.dtype
    widths: StepWidths | None = None
    """Of its steps, where a GPU's memory is planned by them."""
    reads_compressed: bool
    """See `backend.reads_compressed`."""

    def runner(
        self,
        store: KvStore,
        spill: Spill,
        limits: StepLimits | None,
        beside: ModelRunner | None = None,
    ) -> ModelRunner:
        """To be called once. `beside`: see `RunnerRequest`."""
        raise NotImplementedError

    def keep(self, packed: PackedModel | None) -> None:
        """Has the next start of this rank find `packed`, what it computes with, where that can be kept and is not
        yet."""

    def settle(self) -> None:
        """Before the rank ends: waits for what it keeps, or the next start would have to make it once more."""

    streamed: StreamedWeights | None = None
    """Where not all are in memory."""

    @property
    def imports(self) -> list[str]:
        """Modules that the next start of this rank will need beyond those of every start."""
        return []


def load_share(
    settings: ExecutorSettings,
    spec: RankSpec,
    directory: Path,
    device: torch.device,
    collectives: Collectives,
    report: Report,
    enough: "MemoryCheck | None" = None,
) -> Share:
    """`enough`: whether there is room for it; None: `check_room` of the settings. Raises `ModelLoadError` and
    `ConfigurationError`: one sentence with the remedy."""
    choose_level(settings.cpu_level)
    threads = thread_count(settings)
    cache = _cache_of(settings, spec, directory, device, collectives, threads)
    has_room = enough or partial(_has_room, settings, device)
    if settings.weights_memory and (cache is None or not hasattr(os, "eventfd")):
        raise ConfigurationError(
            "--weights-memory needs Linux, a CPU with native kernels (docs/performance.md) and a weight cache "
            "(RYZANSTEIN_WEIGHT_CACHE_BYTES above 0), whose file the other weights are read from; leave it out."
        )
    share = partial(_BuiltShare, settings, spec, directory, device, collectives, report, cache, has_room)
    if cache is None:
        return share()
    take = partial(_take, settings, cache, has_room, threads, report)
    file = cache.find()
    if file is not None and not _turns_as_served(settings, file.facts):
        file.close()
        file = None
    # Either way takes the ranks to the same weights. But one takes seconds longer: all go the same.
    if smallest((int(file is not None),), device, collectives)[0] and file is not None:
        if found := take(file):
            return _CachedShare(settings, spec, collectives, found)
    elif file is not None:
        file.close()
    if not settings.weights_memory:
        return share()
    return _CachedShare(settings, spec, collectives, _kept_at_once(settings, cache, share, take))


def _kept_at_once(
    settings: ExecutorSettings,
    cache: WeightCache,
    build: "Callable[[], _BuiltShare]",
    take: Callable[[PackedFile], CachedWeights | None],
) -> CachedWeights:
    """What `build` makes, taken from the file that it is kept in. Raises `ConfigurationError`."""
    try:
        with in_files(packed_directory(settings)):
            build().write()
    except OSError as error:
        raise ConfigurationError(
            f"The weights cannot be packed in {packed_directory(settings)} ({error.strerror or error}); make room "
            "there, or name another place with RYZANSTEIN_WEIGHT_CACHE_DIRECTORY."
        ) from error
    file = cache.find()
    found = None if file is None else take(file)
    if found is None:
        raise ConfigurationError(
            "--weights-memory reads weights from the weight cache, and this model's could not be kept there (the log "
            "says why: weight_cache_write_failed); raise RYZANSTEIN_WEIGHT_CACHE_BYTES, or leave --weights-memory out."
        )
    return found


def context_of(settings: ExecutorSettings, usual: int, longest: int = 0) -> int:
    """Most tokens of one sequence, of a model that is served with `usual` where nothing is set, and with `longest` at
    most (0: the same). Raises `ConfigurationError`."""
    longest = longest or usual
    if settings.context_length > longest:
        raise ConfigurationError(
            f"--context-length {settings.context_length} is more than the model was made for; "
            f"choose {longest} or less."
        )
    return settings.context_length or usual


def _turns_as_served(settings: ExecutorSettings, facts: ModelFacts) -> bool:
    """Whether the rotary frequencies among weights that were kept are those of sequences as long as are served now."""
    context = settings.context_length or facts.context_length
    return facts.made_for == facts.rotary.made_for(context)


class MemoryCheck(Protocol):
    def __call__(
        self,
        states: LayerStates,
        dtype: torch.dtype,
        context: int,
        widths: StepWidths | None,
        weights: int,
    ) -> None:
        """Raises `ConfigurationError` where this rank has no room for a model that is to serve sequences of `context`
        tokens and whose weights take `weights` bytes; the others as of `ModelFacts` and `Share`."""
        ...


def _has_room(
    settings: ExecutorSettings,
    device: torch.device,
    states: LayerStates,
    dtype: torch.dtype,
    context: int,
    widths: StepWidths | None,
    weights: int,
) -> None:
    """`MemoryCheck` of a model that is alone."""
    held = min(weights, settings.weights_memory or weights)
    check_room(settings, states, dtype, context, device, held, widths)


def _take(
    settings: ExecutorSettings,
    cache: WeightCache,
    has_room: MemoryCheck,
    threads: int,
    report: Report,
    file: PackedFile,
) -> CachedWeights | None:
    """What `file` holds, of which as much goes to memory as the settings allow; closes it. None where it is damaged.
    Raises `ConfigurationError`."""
    facts = file.facts
    context = context_of(settings, facts.context_length, facts.rotary.longest)
    try:
        has_room(facts.states, torch.bfloat16, context, None, file.size)
    except RyzansteinError:
        file.close()
        raise
    if not settings.weights_memory:
        return cache.read(file, threads, report)
    found = cache.stream(file, threads, settings.weights_memory, report)
    if found is not None and found.streamer is not None:
        told = found.streamer.weights
        log.info(
            "weights_streamed",
            layers=sorted(found.streamer.layers),
            memory_bytes=told.memory,
            bytes_per_step=told.per_step,
            disk_bytes_per_second=round(told.disk_rate),
            tokens_per_second=round(told.tokens_per_second, 3),
        )
    return found


def _cache_of(
    settings: ExecutorSettings,
    spec: RankSpec,
    directory: Path,
    device: torch.device,
    collectives: Collectives,
    threads: int,
) -> WeightCache | None:
    """None where weights are not kept, or not packed for the native kernels; alike on every rank."""
    if not settings.weight_cache_bytes or not directory.is_dir():
        return None
    try:
        native_kernels(collectives, device, threads)
    except CannotLower:
        return None
    share = packed_share(settings, spec.rank, spec.world_size)
    return WeightCache(packed_directory(settings), settings.weight_cache_bytes, directory, share)


class _CachedShare(Share):
    """What an earlier start of this rank has kept."""

    is_cached = True
    reads_compressed = True
    dtype = torch.bfloat16

    def __init__(
        self, settings: ExecutorSettings, spec: RankSpec, collectives: Collectives, found: CachedWeights
    ) -> None:
        self.facts = found.facts
        self.layout = ShardLayout.of(found.facts.heads, spec.world_size, spec.rank)
        self._model = found.model
        self._streamer = found.streamer
        self.streamed = None if found.streamer is None else found.streamer.weights
        self._settings = settings
        self._rank = spec.rank
        self._collectives = collectives

    def runner(
        self,
        store: KvStore,
        spill: Spill,
        limits: StepLimits | None,
        beside: ModelRunner | None = None,
    ) -> ModelRunner:
        threads, cores = thread_count(self._settings), cores_of(self._settings, self._rank)
        widths, collectives = self.facts.widths, self._collectives
        return packed_runner(
            self._model,
            widths,
            store,
            self.layout,
            collectives,
            threads,
            spill,
            cores,
            beside,
            self._streamer,
        )


class _BuiltShare(Share):
    """What the checkpoint holds."""

    def __init__(
        self,
        settings: ExecutorSettings,
        spec: RankSpec,
        directory: Path,
        device: torch.device,
        collectives: Collectives,
        report: Report,
        cache: WeightCache | None,
        has_room: MemoryCheck,
    ) -> None:
        from services.executor.gpu.linear import pack_for_gpu, weight_codec
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
        config = load_config(directory)
        check_supported(config)
        self.layout = ShardLayout.from_config(config, spec.world_size, spec.rank)
        self.dtype = choose_dtype(settings, device, config)
        codec = weight_codec(settings.weight_dtype, device, self.dtype)
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
        self._device, self._collectives = device, collectives
        self.reads_compressed = reads_compressed(self._model, self.dtype, collectives, device, self._threads)
        if keep_codes and not self.reads_compressed:
            unpack(self._model, self.dtype, device)
        elif device.type == "cuda":
            pack_for_gpu(self._model, device)  # before the KV cache takes what is free
        if settings.dtype == "auto" and not self.reads_compressed and not platform_of(device).has_fast_bf16():
            self._model.float()  # PyTorch computes it after all
            self.dtype = torch.float32
        self.facts = facts_of(self._model, config, self.layout, context)
        self._cache = cache
        self._keeping: threading.Thread | None = None
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
        runner = make_runner(RunnerRequest(model, store, *where, spill, self._cores, limits, beside))
        give_back()  # what reading and packing took
        return runner

    def write(self) -> None:
        """Keeps the weights, as far as that can be done, and lets go of them. Raises `ConfigurationError` where the
        native kernels do not compute the model."""
        assert self._cache is not None, "there is nowhere to keep them"
        model, self._model = self._model, None
        try:
            packed = packed_model(
                model, self.dtype, self.layout, self._collectives, self._device, self._threads
            )
        except CannotLower as reason:
            raise ConfigurationError(
                f"--weights-memory is for models that the native CPU kernels compute, not this one ({reason}); leave "
                "it out."
            ) from None
        self._cache.keep(self.facts, packed)
        give_back()

    def keep(self, packed: PackedModel | None) -> None:
        if self._cache is not None and packed is not None:
            self._keeping = self._cache.keep_later(self.facts, packed)

    def settle(self) -> None:
        if self._keeping is not None:
            self._keeping.join(KEEP_TIMEOUT)

    @property
    def imports(self) -> list[str]:
        if self._cache is not None and self.reads_compressed:
            return []  # it will be cached
        return ["services.executor.model.loading.loader", self._module]
