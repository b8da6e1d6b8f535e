"""The weights that serving has packed for the native kernels, as a trainer takes them: from the file that ranks keep.

weight cache ──there──▶ mapped: its pages are the page cache's, one copy for all processes
       └──not there──▶ packed as a rank would pack them, kept, mapped
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings, packed_directory, packed_share
from services.executor.core.sharding import ShardLayout
from services.executor.cpu.packed_linear import PackedLinear
from services.executor.cpu.packed_model import PackedModel, lower, pack
from services.executor.cpu.weight_cache import WeightCache
from services.executor.model.catalogue import longest_context
from services.executor.model.loading.loader import keeps_codes, load_model
from services.executor.model.lowering import CannotLower
from services.executor.model.model_facts import ModelFacts, facts_of
from services.executor.model.quantizing import codec_of
from services.executor.native.library import choose_level, load_library
from services.executor.training.base.weights import FrozenWeight, PackedBaseWeight, PackedOutputs
from shared.process import give_back

log = structlog.get_logger(__name__)

_CPU = torch.device("cpu")


def packed_model(
    directory: Path, settings: ExecutorSettings, config: Any, threads: int, collectives: Collectives
) -> PackedModel:
    """The share of this rank. Raises `CannotLower` with the reason where the native kernels compute no such
    model, and `ModelLoadError`."""
    choose_level(settings.cpu_level)
    library = load_library()
    if library is None:
        raise CannotLower("there are no native kernels here")
    share = packed_share(settings, collectives.rank, collectives.world_size)
    cache = WeightCache(packed_directory(settings), settings.weight_cache_bytes, directory, share)
    if found := _mapped(cache, threads):
        return found
    how = (library, directory, settings, config, threads, collectives)
    facts, model = _packed(*how)
    cache.keep(facts, model)
    if (kept := cache.find()) is not None:
        kept.close()
        del model  # not in memory and in the file's pages at a time
        give_back()
        if found := _mapped(cache, threads):
            return found
        _, model = _packed(*how)
    log.warning("packed_weights_in_memory", reason="the weight cache has no room for them", bytes=_size_of(model))
    return model


def packed_weights(
    packed: PackedModel, head: str, embedding: str, pool: ThreadPoolExecutor, threads: int
) -> dict[str, FrozenWeight]:
    """By the module's name, `head` and `embedding` among them."""
    library = load_library()
    pieces: dict[str, list[PackedOutputs]] = {}
    for linear in (part for layer in packed.layers for whole in layer.linears for part in whole.parts):
        for there in linear.sources:
            rows = PackedOutputs(linear, there.source.first, there.rows, there.first, there.run, there.step)
            pieces.setdefault(there.source.module, []).append(rows)
    made: dict[str, FrozenWeight] = {}
    for name, parts in pieces.items():
        parts.sort(key=lambda part: part.begin)
        made[name] = PackedBaseWeight(library, parts, parts[0].linear.inputs, pool, threads)
    for name, whole in ((head, packed.head), (embedding, packed.embedding)):
        parts = [*_end_to_end(whole)]
        made[name] = PackedBaseWeight(library, parts, whole.inputs, pool, threads)
    return made


def _end_to_end(whole: PackedLinear) -> Iterator[PackedOutputs]:
    begin = 0
    for linear in whole.parts:
        rows = linear.outputs
        yield PackedOutputs(linear, begin, rows, 0, rows, rows)
        begin += rows


def _mapped(cache: WeightCache, threads: int) -> PackedModel | None:
    file = cache.find()
    found = None if file is None else cache.map(file, threads)
    return None if found is None else found.model


def _packed(
    library: Any, directory: Path, settings: ExecutorSettings, config: Any, threads: int, collectives: Collectives
) -> tuple[ModelFacts, PackedModel]:
    """As a rank that serves it packs it."""
    log.info("packing_weights", directory=str(directory), reason="the weight cache has none of this model")
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    keeps = keeps_codes(settings.weight_dtype, config)
    model: Any = load_model(
        directory,
        torch.bfloat16,
        layout,
        collectives,
        _CPU,
        lambda done, total: None,
        codec_of(settings.weight_dtype),
        keep_codes=keeps,
        defer_codes=keeps,
    )
    lowered = lower(model, torch.bfloat16, collectives.world_size)
    facts = facts_of(model, config, layout, longest_context(config))
    return facts, pack(library, lowered, layout, threads)


def _size_of(packed: PackedModel) -> int:
    return sum(linear.nbytes for layer in packed.layers for linear in layer.linears)
