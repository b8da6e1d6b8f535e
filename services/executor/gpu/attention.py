"""Attention over a rank's KV store by the Triton kernels, in place of PyTorch's operators."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.sparse_attention import DEVIATIONS
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.gpu.inputs import Shape, Split, StepInputs, inputs_of
from services.executor.gpu.kernels import attention_launch, pages
from services.executor.gpu.sparse_attention import SparseStep, sparse_rows
from services.executor.kv_cache.store import KvStore
from services.executor.model.step_context import ScoreRule
from services.executor.platforms.base import sent

CPU_PROCESSORS = 4  # what the interpreter pretends to have


def processors_of(device: torch.device) -> int:
    """What works at once on `device`."""
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


class StepBatches:
    """What attention needs of a step, made once for all layers of the same heads."""

    def __init__(
        self, plan: StepPlan, block_size: int, device: torch.device, processors: int, compressions: Tensor | None
    ) -> None:
        """`compressions` as `StepInputs` has them."""
        self.compressions = compressions
        self._plan, self._device = plan, device
        self._shape = Shape(block_size, 1, 1, processors)  # but for the heads, which each layer has
        self._batches: dict[tuple[int, int], Sequence[attention_launch.Batch]] = {}
        self._rows = sparse_rows(plan, block_size)
        self._sparse: dict[tuple[int, int], SparseStep] = {}

    @cached_property
    def slots(self) -> Tensor:
        """int32 [T]"""
        return sent(as_int32(self._plan.slots).copy(), self._device)

    @cached_property
    def positions(self) -> Tensor:
        """int32 [T]"""
        return sent(as_int32(self._plan.positions).copy(), self._device)

    def of(self, kv_heads: int, group: int) -> Sequence[attention_launch.Batch]:
        """The decodes, and the prefill chunks, whose tiles are larger."""
        heads = (kv_heads, group)
        if heads not in self._batches:
            shape = self._shape._replace(kv_heads=kv_heads, group=group)
            self._batches[heads] = inputs_of(self._plan, shape, self._device).batches
        return self._batches[heads]

    def split(self, layer: int, kv_heads: int, group: int) -> Split | None:
        """As `StepInputs.split`."""
        if not self._rows:
            return None
        heads = (kv_heads, group)
        if heads not in self._sparse:
            shape = self._shape._replace(kv_heads=kv_heads, group=group)
            self._sparse[heads] = SparseStep(self._plan, self._rows, shape, self._device)
        return self._sparse[heads].split(layer)


class GpuKernels:
    """`AttentionBackend` by the Triton kernels; and the compression of blocks."""

    def __init__(self, store: KvStore, first_seen: int = 0) -> None:
        """From now on `store` compresses by the kernels. `first_seen`: as `StepContext` has it."""
        self._store = store
        self._first_seen = first_seen
        self._device = store.device
        self.processors = processors_of(store.device)
        # By layer: finding out its slopes waits for the device.
        self._scores: dict[int, attention_launch.ScoreOptions] = {}
        self._layers = [
            attention_launch.AttentionLayer(
                store.writable(layer), store.codes(layer), store.scales(layer), store.codec(layer)
            )
            for layer in range(store.shape.num_layers)
        ]
        # The quantized blocks, and which layers they are of.
        self._compressed = [
            (torch.tensor(quantized.layers, dtype=torch.int64, device=store.device), quantized)
            for quantized in store.quantized_layers()
            if not store.shape.pages[quantized.layers[0]].summary
        ]
        summaries = {page: store.shape.summary_of(page) for page in store.shape.choosing}
        # By the page layer that they are of.
        self._summaries = {page: self._layers[summary] for page, summary in summaries.items() if summary is not None}
        self._first = torch.zeros(1, dtype=torch.int64, device=store.device)
        store.compressor = self.compress

    def begin(self, plan: StepPlan) -> StepBatches:
        pairs = self.pairs_of(plan)
        return StepBatches(plan, self._store.block_size, self._device, self.processors, pairs)

    def write(self, step: StepBatches, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value` [T, kv heads, d] at `slots` int64 [T], and seals what the step fills."""
        attention_launch.write(_rows(key), _rows(value), slots, self._layers[layer].writable)
        self.seal(step, layer)

    def attend(
        self,
        step: StepBatches | StepInputs,
        layer: int,
        query: Tensor,
        rule: ScoreRule,
        window: int | None,
        out: Tensor,
        choosing: int | None = None,
    ) -> None:
        """Fills `out` from `query`, both [T, kv heads, group, d]; the step's keys have been written. `choosing`: as
        `AttentionBackend` has it."""
        if layer not in self._scores:
            sinks = None if rule.sinks is None else rule.sinks.reshape(-1).float()
            slopes = _slopes(rule, query.device)
            self._scores[layer] = attention_launch.ScoreOptions(
                rule.scale, rule.softcap, window, sinks, slopes, self._first_seen
            )
        query, heads = query.contiguous(), query.shape[1:3]
        split = None if choosing is None else step.split(choosing, *heads)
        if split is None:
            self._attend(layer, query, step.of(*heads), out)
        else:
            self._attend_split(layer, query, split, out)

    def _attend(self, layer: int, query: Tensor, batches: Sequence[attention_launch.Batch], out: Tensor) -> None:
        for batch in batches:
            attention_launch.attend(query, self._layers[layer], batch, self._scores[layer], out)

    def _attend_split(self, layer: int, query: Tensor, split: Split, out: Tensor) -> None:
        """As `attend`, where some rows read some blocks only."""
        if split.dense is not None:
            self._attend_rows(layer, query, *split.dense, out)
        for part in split.rounds:
            tables = pages.choose(query, self._summaries.get(layer), part.chosen, DEVIATIONS)
            self._attend_rows(layer, query, part.rows, [part.batch._replace(tables=tables.flatten())], out)

    def _attend_rows(
        self, layer: int, query: Tensor, rows: Tensor | None, batches: Sequence[attention_launch.Batch], out: Tensor
    ) -> None:
        """Fills `rows` int64 [n] of `out`, all where there are none; `batches` count them from 0."""
        if rows is None:
            self._attend(layer, query, batches, out)
            return
        own = query.index_select(0, rows)
        made = torch.empty_like(own)
        self._attend(layer, own, batches, made)
        out.index_copy_(0, rows, made)

    def layer(self, page: int) -> attention_launch.AttentionLayer:
        """What kernels read of page layer `page`."""
        return self._layers[page]

    def pairs_of(self, plan: StepPlan) -> Tensor | None:
        """What `plan` compresses, as `StepInputs.compressions`. Waits for nothing: most steps of many sequences fill
        some block, and the step before is still being computed."""
        if not plan.compressions:
            return None
        pairs = as_int32(plan.compressions).reshape(-1, 2)
        self._store.check_pairs(pairs)
        return self._sent(pairs)

    def seal(self, step: StepBatches | StepInputs, layer: int) -> None:
        """Compresses and summarises the blocks that the step fills, in one layer; its keys and values have been
        written."""
        if step.compressions is not None:
            attention_launch.compress_layer(self._layers[layer], step.compressions, self._first)
        if (summaries := self._summaries.get(layer)) is not None:
            own = self._layers[layer]
            pages.summarise(own, summaries, step.compressions, step.positions, step.slots)

    def compress(self, pairs: NDArray[np.int32]) -> None:
        """Pairs int32 [C, 2] (writable id, quantized id), in all layers; their summaries too."""
        on_device = self._sent(pairs)
        writable = self._store.writable_layers()
        for layers, quantized in self._compressed:
            attention_launch.compress(writable, layers, quantized.codes, quantized.scales, quantized.codec, on_device)
        for layer, summaries in self._summaries.items():
            pages.summarise(self._layers[layer], summaries, on_device)

    def _sent(self, pairs: NDArray[np.int32]) -> Tensor:
        return sent(pairs.astype(np.int64) - (0, self._store.num_writable), self._device)


def _rows(tensor: Tensor) -> Tensor:
    """With every row contiguous: rows themselves may lie apart."""
    inner = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if inner else tensor.contiguous()


def _slopes(rule: ScoreRule, device: torch.device) -> Tensor | None:
    """Linear biases by their slopes: what is added to all of a row's scores changes no weight."""
    if rule.key_bias is None:
        return None
    ends = rule.key_bias(torch.tensor([0, 1], device=device)).float()
    return (ends[..., 1] - ends[..., 0]).reshape(-1).contiguous()
