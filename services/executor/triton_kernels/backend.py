"""Attention over a rank's KV store by the Triton kernels, in place of PyTorch's operators."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.engine.plan import StepPlan, as_int32
from services.executor.kv_cache.store import KvStore
from services.executor.model.scores import ScoreRule
from services.executor.triton_kernels import launch
from services.executor.triton_kernels.tiles import splits_of, tiles_of

CPU_PROCESSORS = 4
"""What the interpreter pretends to have."""


class StepTensors:
    """A step's sequences on the device, made once and shared by all layers."""

    def __init__(self, plan: StepPlan, block_size: int, device: torch.device, processors: int) -> None:
        self._num_decodes = plan.num_decodes
        self._query_lens = as_int32(plan.query_lens).astype(np.int64)
        self._context_lens = as_int32(plan.context_lens).astype(np.int64)
        blocks = -(-self._context_lens // block_size)
        starts = np.cumsum(blocks) - blocks
        ends = np.concatenate(([0], np.cumsum(self._query_lens)))
        # One copy for all of them: each costs as much as many bytes.
        arrays = (as_int32(plan.block_tables), starts, ends, self._context_lens)
        self._shared = _to_device(arrays, device)
        self._device = device
        self._processors = processors
        self._batches: dict[tuple[int, int], list[launch.Batch]] = {}

    def batches(self, kv_heads: int, group: int) -> list[launch.Batch]:
        """The decodes, and the prefill chunks, whose tiles are larger."""
        if (kv_heads, group) not in self._batches:
            parts = ((0, self._num_decodes), (self._num_decodes, len(self._query_lens)))
            self._batches[kv_heads, group] = [
                self._batch(first, end, kv_heads, group) for first, end in parts if end > first
            ]
        return self._batches[kv_heads, group]

    def _batch(self, first: int, end: int, kv_heads: int, group: int) -> launch.Batch:
        lens = self._query_lens[first:end]
        rows = launch.rows_for(group, int(lens.max()))
        tiles = tiles_of(lens, rows // group)
        sequence, token = _to_device((tiles.sequence + first, tiles.first), self._device)
        longest = int(self._context_lens[first:end].max())
        tables, table_starts, query_starts, context_lens = self._shared
        return launch.Batch(
            tables,
            table_starts,
            query_starts,
            context_lens,
            sequence,
            token,
            rows_per_tile=rows,
            splits=splits_of(len(tiles.sequence) * kv_heads, longest, self._processors),
            first_row=int(self._query_lens[:first].sum()),
            num_rows=int(lens.sum()),
        )


class GpuKernels:
    """What a step asks for, layer by layer; and the compression of blocks."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._device = store.device
        self._processors = CPU_PROCESSORS
        if store.device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(store.device).multi_processor_count
        self._layers = [
            launch.Layer(store.hot(layer), store.codes(layer), store.scales(layer), store.codec(layer))
            for layer in range(store.shape.num_layers)
        ]
        store.compressor = self.compress

    def begin(self, plan: StepPlan) -> StepTensors:
        return StepTensors(plan, self._store.block_size, self._device, self._processors)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value` [T, kv heads, d] at `slots` int64 [T]."""
        launch.write(_rows(key), _rows(value), slots, self._layers[layer].hot)

    def attend(
        self, step: StepTensors, layer: int, query: Tensor, rule: ScoreRule, window: int | None, out: Tensor
    ) -> None:
        """Fills `out` from `query`, both [T, kv heads, group, d]; the step's keys have been written."""
        kv_heads, group = query.shape[1:3]
        scores = launch.Scores(
            rule.scale, rule.softcap, window, _flat(rule.sinks), _slopes(rule, query.device)
        )
        for batch in step.batches(kv_heads, group):
            launch.attend(query.contiguous(), self._layers[layer], batch, scores, out)

    def compress(self, pairs: NDArray[np.int32]) -> None:
        """Pairs int32 [C, 2] (hot id, cold id), in all layers."""
        places = pairs.astype(np.int64) - (0, self._store.num_hot)
        on_device = torch.from_numpy(places).to(self._device)
        hot = self._store.hot_layers()
        for cold in self._store.cold_layers():
            layers = torch.tensor(cold.layers, dtype=torch.int64, device=self._device)
            launch.compress(hot, layers, cold.codes, cold.scales, cold.codec, on_device)


def _to_device(arrays: Sequence[NDArray[np.int64] | NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Each as int32 there."""
    whole = torch.from_numpy(np.concatenate(arrays).astype(np.int32)).to(device)
    return list(torch.split(whole, [len(array) for array in arrays]))


def _rows(tensor: Tensor) -> Tensor:
    """With every row contiguous: rows themselves may lie apart."""
    inner = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if inner else tensor.contiguous()


def _flat(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.reshape(-1).float()


def _slopes(rule: ScoreRule, device: torch.device) -> Tensor | None:
    """Linear biases by their slopes: what is added to all of a row's scores changes no weight."""
    if rule.key_bias is None:
        return None
    ends = rule.key_bias(torch.tensor([0, 1], device=device)).float()
    return (ends[..., 1] - ends[..., 0]).reshape(-1).contiguous()
