"""How fast attention reads its blocks in decodes, and multiplies in prefills. Rows for `python -m benchmarks.gpu`.

Timed by CUDA events around replays of a graph, so that no host is in them. A graph goes through as many layers as it
takes for their blocks to be several times the cache of the chip, as a model's layers are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.on_gpu.device import choose

choose()

from benchmarks.on_gpu.bench import Bench, Row, rate  # noqa: E402
from benchmarks.on_gpu.machine import graph_seconds  # noqa: E402
from services.executor.gpu.kernels import attention_launch  # noqa: E402
from services.executor.gpu.kernels.tiles import rows_for, splits_of, tiles_of  # noqa: E402
from services.executor.kv_cache.codecs import CODECS  # noqa: E402
from shared.data_types import BlockDType  # noqa: E402

KV_HEADS, GROUP, WIDTH, BLOCK = 8, 4, 128, 16
"""Of an 8B-shaped model."""
BANDWIDTH = 4.8e12
"""Bytes per second that an H200's data sheet says, where nothing was measured."""
MATRIX_RATE = 790e12
"""FLOP per second of bf16 products, seen on one."""
ENOUGH_BYTES = 1 << 30
MOST_LAYERS = 256
"""So that short contexts, too, are several times the 60 MB that an H200 keeps in its cache."""
REPEATS = 10


@dataclass(frozen=True)
class Load:
    """Sequences alike: `tokens` of each are computed, of a context of `context`."""

    sequences: int
    tokens: int
    context: int
    kind: BlockDType
    hot_tokens: int
    """The last ones of the context, whose blocks are not compressed."""

    @property
    def bytes_read(self) -> float:
        """Of a layer's blocks, once."""
        cold = self.context - self.hot_tokens
        codec = CODECS[self.kind]
        per_block = 2 * KV_HEADS * (BLOCK * WIDTH + 4) if codec else 2 * KV_HEADS * BLOCK * WIDTH * 2
        return self.sequences * (cold / BLOCK * per_block + self.hot_tokens * 2 * KV_HEADS * WIDTH * 2)

    @property
    def operations(self) -> float:
        """Of both products, with the keys that rows see."""
        seen = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) / 2
        return 4.0 * self.sequences * seen * KV_HEADS * GROUP * WIDTH


def run(bench: Bench) -> Iterator[Row]:
    """Rows of `attention/...`: GB/s of decodes, TFLOP/s of prefills."""
    for load in _decodes(bench.tiny):
        length = f"{load.context // 1024}k" if load.context >= 1024 else str(load.context)
        key = f"attention/decode/{load.kind}/{length}/{load.sequences}"
        what = f"decode of {load.sequences} x {load.context} tokens, {load.kind} KV"
        seconds = _seconds(load, bench.device)
        yield rate(key, what, load.bytes_read, seconds, bench.bandwidth or BANDWIDTH, note="")
    for load in _prefills(bench.tiny):
        key = f"attention/prefill/{load.kind}/{load.tokens}/{load.context}"
        what = f"prefill of {load.tokens} tokens, context {load.context}, {load.kind} KV"
        limit = bench.matrix_rate("bf16") or MATRIX_RATE
        yield rate(key, what, load.operations, _seconds(load, bench.device), limit, "TFLOP/s", "")


def _decodes(tiny: bool) -> Iterator[Load]:
    for context in (64,) if tiny else (1024, 8192, 32768):
        for sequences in (1, 2) if tiny else (1, 8, 32, 128):
            for kind in CODECS:
                yield Load(sequences, 1, context, kind, context if kind == "bf16" else BLOCK)


def _prefills(tiny: bool) -> Iterator[Load]:
    chunk = 32 if tiny else 2048
    yield Load(1, chunk, chunk, "bf16", chunk)
    yield Load(
        1, 2 * chunk if tiny else 8192, 2 * chunk if tiny else 8192, "bf16", 2 * chunk if tiny else 8192
    )
    for kind in CODECS:
        context = 2 * chunk if tiny else 16384
        yield Load(1, chunk, context, kind, context if kind == "bf16" else chunk)


def _seconds(load: Load, device: torch.device) -> float:
    """Of one layer."""
    layers = max(1, min(MOST_LAYERS, int(ENOUGH_BYTES / load.bytes_read))) if device.type == "cuda" else 1
    if load.tokens > 1:
        layers = 1
    stores = [_layer(load, device) for _ in range(layers)]
    batch = _batch(load, device)
    query = torch.randn(load.sequences * load.tokens, KV_HEADS, GROUP, WIDTH, device=device).bfloat16()
    out = torch.empty_like(query)

    scores = attention_launch.Scores(WIDTH**-0.5)
    attend = [partial(attention_launch.attend, query, layer, batch, scores, out) for layer in stores]
    return graph_seconds(attend, device, REPEATS)


def _layer(load: Load, device: torch.device) -> attention_launch.Layer:
    codec = CODECS[load.kind]
    hot = -(-load.hot_tokens // BLOCK) * load.sequences
    cold = -(-load.context // BLOCK) * load.sequences - hot
    size = (2, KV_HEADS, BLOCK, WIDTH)
    numbers = torch.empty((hot, *size), dtype=torch.bfloat16, device=device).normal_()
    if codec is None:
        return attention_launch.Layer(numbers, numbers[:0], None, None)
    codes = torch.empty((cold, *size), dtype=torch.int8, device=device).random_(0, 120).view(codec.dtype)
    scales = torch.full((cold, 2, KV_HEADS), 0.01, device=device)
    return attention_launch.Layer(numbers, codes, scales, codec)


def _batch(load: Load, device: torch.device) -> attention_launch.Batch:
    """Each sequence's blocks cold ones first, scattered as an old server's are."""
    draw = np.random.default_rng(1)
    blocks = -(-load.context // BLOCK)
    hot = -(-load.hot_tokens // BLOCK)
    hot_ids = draw.permutation(hot * load.sequences).reshape(load.sequences, hot)
    cold_ids = draw.permutation((blocks - hot) * load.sequences).reshape(load.sequences, -1)
    tables = np.concatenate((cold_ids + hot * load.sequences, hot_ids), axis=1)
    rows = rows_for(GROUP, load.tokens)
    tiles = tiles_of(np.full(load.sequences, load.tokens), rows // GROUP)
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    total = load.sequences * load.tokens

    def numbers(values: Any) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int32).ravel()).to(device)

    last = hot_ids[:, -1:] * BLOCK + np.zeros((1, load.tokens), np.int64)
    chunk = np.arange(load.context - load.tokens, load.context)
    if load.tokens <= load.hot_tokens:
        last = (
            np.take_along_axis(hot_ids, chunk[None] // BLOCK - (blocks - hot), axis=1) * BLOCK + chunk % BLOCK
        )
    return attention_launch.Batch(
        slots=numbers(last),
        tables=numbers(tables),
        table_starts=numbers(np.arange(load.sequences) * blocks),
        query_starts=numbers(np.arange(load.sequences + 1) * load.tokens),
        context_lens=numbers(np.full(load.sequences, load.context)),
        tile_sequence=numbers(tiles.sequence),
        tile_first=numbers(tiles.first),
        rows_per_tile=rows,
        splits=splits_of(len(tiles.sequence) * KV_HEADS, load.context, processors),
        first_row=0,
        num_rows=total,
    )
