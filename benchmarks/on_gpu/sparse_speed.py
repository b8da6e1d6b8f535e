"""Sparse attention beside dense: whether the kernels read what PyTorch chooses, and what a decode step's attention
takes, as requests have it by default: `python -m benchmarks.gpu --only sparse`.

Layers of an 8B over int8 blocks; as many as their blocks are several times a chip's cache. Keys are random, so that
scores, and what is read for them, are as far apart as chance has it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.steps import Row as Sequence
from benchmarks.engine.steps import step_plan
from benchmarks.on_gpu.bench import ROUNDED, Bench, Row, checked
from benchmarks.on_gpu.machine import graph_seconds
from services.executor.core.sparse_attention import SparsePattern
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.codecs import INT8
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.attention import attend
from services.executor.model.step_context import ScoreRule, StepContext
from shared.messages import SparseAttention

CACHE = 256 << 20  # bytes of keys and values that steps go through in turns
LAYERS = 32


class Shape(NamedTuple):
    kv_heads: int
    group: int
    width: int
    block: int
    contexts: tuple[int, ...]
    choice: SparseAttention


LLAMA = Shape(8, 4, 128, 16, (32_768, 131_072), SparseAttention())  # a layer of Llama 3 8B
QUICK = LLAMA._replace(contexts=(16_384,))
TINY = Shape(2, 2, 32, 4, (90,), SparseAttention(threshold=18, sinks=3, recent=6, budget=8, share=0.3))


def run(bench: Bench) -> Iterator[Row]:
    """Rows of `sparse/...`: errors, and ms of a step's attention. An error of a page that is read for another, which
    scores the same but for rounding, is less than what is allowed, and of one table that is wrong far more."""
    for held in _held(TINY if bench.tiny else LLAMA, bench.device):
        yield held.error()
        dense, sparse = (held.speed(choice, bench.bandwidth) for choice in (None, held.shape.choice))
        yield from (dense, sparse)
        assert dense.figure is not None, "it was measured"
        assert sparse.figure is not None, "it was measured"
        what = f"dense attention over sparse, decode at {held.context} tokens"
        yield Row(f"sparse/times/{held.context}", what, dense.figure / sparse.figure, "times")


def errors(bench: Bench) -> Iterator[Row]:
    """Whether it is right, alone: for a first look at a machine."""
    return (held.error() for held in _held(TINY if bench.tiny else QUICK, bench.device))


def _held(shape: Shape, device: torch.device) -> Iterator["_Held"]:
    return (_Held(shape, context, device) for context in shape.contexts)


class _Held:
    """One sequence's blocks in some layers, and the kernels that read them."""

    def __init__(self, shape: Shape, context: int, device: torch.device) -> None:
        from services.executor.gpu.attention import GpuKernels

        self.shape, self.context, self._device = shape, context, device
        blocks = -(-context // shape.block)
        self._layer_bytes = 2 * shape.kv_heads * shape.width * context
        layers = max(1, CACHE // self._layer_bytes) if device.type == "cuda" else 1
        page = StoreShape.uniform(layers, shape.block, shape.kv_heads, shape.width, torch.bfloat16, (INT8,) * layers)
        page = replace(page, choosing=tuple(range(layers))).with_summaries()
        self._store = KvStore(page, 1, device, blocks)
        self._layers = range(layers)
        self._kernels = GpuKernels(self._store)
        draw = torch.Generator(device).manual_seed(1)
        self._store.writable(0).normal_(generator=draw)
        for layer in self._layers:
            self._fill(layer, blocks, draw)
        table = np.random.default_rng(1).permutation(blocks - 1) + 1
        self._table = [*table.tolist(), 0]
        rows = (1, shape.kv_heads, shape.group, shape.width)
        self._query = torch.randn(rows, generator=draw, device=device).bfloat16()

    def _fill(self, layer: int, blocks: int, draw: torch.Generator) -> None:
        """Random codes, keys of each block around a mean of their own, and their summaries."""
        from services.executor.gpu.kernels import pages

        codes, scales = self._store.codes(layer), self._store.scales(layer)
        assert scales is not None, "int8 blocks have scales"
        mean = torch.randn((*codes.shape[:3], 1, codes.shape[-1]), generator=draw, device=self._device)
        codes.random_(-60, 61, generator=draw)
        codes += (20 * mean).clamp(-60, 60).to(torch.int8)
        scales.fill_(0.02)
        places = torch.arange(blocks, device=self._device)
        pairs = torch.stack((torch.zeros_like(places), places), 1)
        summary = self._store.shape.summary_of(layer)
        assert summary is not None, "its layers choose"
        own, summaries = (self._kernels.layer(page) for page in (layer, summary))
        pages.summarise(own, summaries, pairs)

    def _plan(self, choice: SparseAttention | None) -> StepPlan:
        """A decode of the last token."""
        row, size = Sequence(self.context, 1, self._table), self.shape.block
        return step_plan([row], size, token_ids=to_bytes([0]), sparse=to_bytes(list(SparsePattern.of(choice))))

    @property
    def _rule(self) -> ScoreRule:
        return ScoreRule(self.shape.width**-0.5)

    def _attended(self, step: Any, layer: int) -> Tensor:
        out = torch.empty_like(self._query)
        self._kernels.attend(step, layer, self._query, self._rule, None, out, self.shape.choice.dense_layers)
        return out

    def error(self) -> Row:
        plan = self._plan(self.shape.choice)
        found = self._attended(self._kernels.begin(plan), 0).float()
        step = StepContext(plan, self._store, lambda: None)
        line = self._query[:, :, 0].transpose(0, 1)  # what is stored is there: lines are asked for their width alone
        expected = attend(
            step, 0, self._query, (line, line), self._rule, None, self.shape.width, reads_only=True,
            choosing=self.shape.choice.dense_layers,
        ).float()  # fmt: skip
        what = f"sparse attention of a decode at {self.context} tokens, against PyTorch's choice and attention"
        return checked(f"sparse/right/{self.context}", what, found, expected, ROUNDED)

    def speed(self, choice: SparseAttention | None, bandwidth: float | None) -> Row:
        """Of a model's layers, all of them sparse where there is a choice."""
        step = self._kernels.begin(self._plan(choice))
        works = [partial(self._attended, step, layer) for layer in self._layers]
        seconds, how = graph_seconds(works, self._device), "dense" if choice is None else "sparse"
        least = self._layer_bytes * self._share(choice) / bandwidth if bandwidth else None
        what = f"{how} attention of a decode at {self.context} tokens, {LAYERS} layers of an 8B, int8 KV"
        limit, share = (least * LAYERS * 1e3, least / seconds) if least else (None, None)
        return Row(f"sparse/{how}/{self.context}", what, seconds * LAYERS * 1e3, "ms", limit, share)

    def _share(self, choice: SparseAttention | None) -> float:
        """Of a layer's keys and values, with the summaries of the blocks that are scored."""
        size, position = self.shape.block, self.context - 1
        if choice is None or (reading := SparsePattern.of(choice).reading(position, size)) is None:
            return 1.0
        own = position // size
        read = reading.first + reading.top + own + 1 - reading.recent
        summaries = 2 / size * (reading.recent - reading.first)  # of bf16, beside codes of a byte
        return (read + summaries) / (own + 1)
