"""One rank's share of a model for the native kernels: read from the weight cache, or built and kept there.

A share that is read needs neither transformers nor the checkpoint.
"""

import threading
from typing import Any

import structlog
import torch

from services.executor.core.settings import ExecutorSettings, cores_of, packed_directory, packed_share, thread_count
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.cpu.packed_file import PackedFile
from services.executor.cpu.packed_model import pack
from services.executor.cpu.weight_cache import CachedWeights, WeightCache
from services.executor.kv_cache.capacity import smallest
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.loading.arena import in_files
from services.executor.model.lowering import CannotLower
from services.executor.model.model_facts import ModelFacts
from services.executor.worker.backends.base import Backend, BuiltShare, RunnerRequest
from services.executor.worker.backends.native_runner import lower_natively, native_kernels, native_runner
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, ShareRequest, context_of
from shared.errors import ConfigurationError, RyzansteinError
from shared.process import give_back

log = structlog.get_logger(__name__)

# Seconds that a rank which ends waits for its weights to be kept; its supervisor waits for `LEAVE_TIMEOUT`.
KEEP_TIMEOUT = 4.0


def cache_of(request: ShareRequest) -> WeightCache | None:
    """None where weights are not kept, or not packed for the native kernels; alike on every rank."""
    settings, spec, directory, _, collectives, *_ = request
    if not settings.weight_cache_bytes or not directory.is_dir():
        return None
    try:
        native_kernels(collectives, thread_count(settings))
    except CannotLower:
        return None
    share = packed_share(settings, spec.rank, spec.world_size)
    return WeightCache(packed_directory(settings), settings.weight_cache_bytes, directory, share)


def load_packed(request: ShareRequest, backend: Backend, cache: WeightCache) -> Share:
    """What is kept in `cache`; else what `backend` computes of the checkpoint, which is kept there. Raises
    `ModelLoadError` and `ConfigurationError`."""
    file = cache.find()
    if file is not None and not _turns_as_served(request.settings, file.facts):
        file.close()
        file = None
    # Either way takes the ranks to the same weights. But one takes seconds longer: all go the same.
    if smallest((int(file is not None),), request.device, request.collectives)[0] and file is not None:
        if found := _take(request, cache, file):
            return CachedShare(request, found)
    elif file is not None:
        file.close()
    if not request.settings.weights_memory:
        return PackedShare(request, backend, cache)
    return CachedShare(request, _kept_at_once(request, backend, cache))


def _kept_at_once(request: ShareRequest, backend: Backend, cache: WeightCache) -> CachedWeights:
    """What is built of the checkpoint, taken from the file that it is kept in. Raises `ConfigurationError`."""
    settings = request.settings
    try:
        with in_files(packed_directory(settings)):
            PackedShare(request, backend, cache).write()
    except OSError as error:
        raise ConfigurationError(
            f"The weights cannot be packed in {packed_directory(settings)} ({error.strerror or error}); make room "
            "there, or name another place with RYZANSTEIN_WEIGHT_CACHE_DIRECTORY."
        ) from error
    file = cache.find()
    found = None if file is None else _take(request, cache, file)
    if found is None:
        raise ConfigurationError(
            "--weights-memory reads weights from the weight cache, and this model's could not be kept there (the log "
            "says why: weight_cache_write_failed); raise RYZANSTEIN_WEIGHT_CACHE_BYTES, or leave --weights-memory out."
        )
    return found


def _turns_as_served(settings: ExecutorSettings, facts: ModelFacts) -> bool:
    """Whether the rotary frequencies among weights that were kept are those of sequences as long as are served now."""
    context = settings.context_length or facts.context_length
    return facts.made_for == facts.rotary.made_for(context)


def _take(request: ShareRequest, cache: WeightCache, file: PackedFile) -> CachedWeights | None:
    """What `file` holds, of which as much goes to memory as the settings allow; closes it. None where it is damaged.
    Raises `ConfigurationError`."""
    settings, facts = request.settings, file.facts
    threads, report = thread_count(settings), request.report
    context = context_of(settings, facts.context_length, facts.rotary.longest)
    try:
        request.check_room(facts.states, torch.bfloat16, context, None, file.size)
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


class CachedShare(Share):
    """What an earlier start of this rank has kept."""

    is_cached = True
    reads_compressed = True
    dtype = torch.bfloat16

    def __init__(self, request: ShareRequest, found: CachedWeights) -> None:
        self.facts = found.facts
        self.layout = ShardLayout.of(found.facts.heads, request.spec.world_size, request.spec.rank)
        self._model = found.model
        self._streamer = found.streamer
        self.streamed = None if found.streamer is None else found.streamer.weights
        self._settings = request.settings
        self._rank = request.spec.rank
        self._collectives = request.collectives

    def runner(
        self, store: KvStore, spill: Spill, limits: StepLimits | None, beside: ModelRunner | None = None
    ) -> ModelRunner:
        threads, cores = thread_count(self._settings), cores_of(self._settings, self._rank)
        where = (self.layout, self._collectives, store.device, threads)
        request = RunnerRequest(None, store, *where, spill, cores, beside=beside)
        return native_runner(self._model, self.facts.widths, request, "cached", self._streamer)


class PackedShare(BuiltShare):
    """What the checkpoint holds, to be kept."""

    def __init__(self, request: ShareRequest, backend: Backend, cache: WeightCache) -> None:
        super().__init__(request, backend)
        self._cache = cache
        self._keeping: threading.Thread | None = None

    def write(self) -> None:
        """Keeps the weights, as far as that can be done, and lets go of them. Raises `ConfigurationError` where the
        native kernels do not compute the model."""
        model, self._model = self._model, None
        try:
            library, lowered = lower_natively(model, self.dtype, self._collectives, self._threads)
        except CannotLower as reason:
            raise ConfigurationError(
                f"--weights-memory is for models that the native CPU kernels compute, not this one ({reason}); leave "
                "it out."
            ) from None
        self._cache.keep(self.facts, pack(library, lowered, self.layout, self._threads))
        give_back()

    def keep(self, packed: Any) -> None:
        if packed is not None:
            self._keeping = self._cache.keep_later(self.facts, packed)

    def settle(self) -> None:
        if self._keeping is not None:
            self._keeping.join(KEEP_TIMEOUT)

    @property
    def imports(self) -> list[str]:
        return [] if self.reads_compressed else super().imports  # it will be cached
