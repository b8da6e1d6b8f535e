"""The kernels as functions of tensors."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.executor.kv_cache.codecs import FP8, INT8, SMALLEST_SCALE, Codec
from services.executor.triton_kernels import attention, blocks, codes

BLOCK_N = 64
"""Keys of one turn."""
DECODE_ROWS = 16
"""Least rows of a tile: the least of a matrix product."""
PREFILL_ROWS = 128


class Layer(NamedTuple):
    """One layer's blocks."""

    hot: Tensor
    """[num_hot, 2, kv_heads, block_size, head_dim]"""
    codes: Tensor
    """[num_cold, 2, kv_heads, block_size, head_dim]"""
    scales: Tensor | None
    """float32 [num_cold, 2, kv_heads]; None: the cold ones are as they are."""
    codec: Codec | None


class Batch(NamedTuple):
    """A step's sequences, on the device."""

    tables: Tensor
    """int32, one after the other."""
    table_starts: Tensor
    """int32 [S]"""
    query_starts: Tensor
    """int32 [S + 1]"""
    context_lens: Tensor
    """int32 [S]"""
    tile_sequence: Tensor
    tile_first: Tensor
    rows_per_tile: int
    """BLOCK_M"""
    splits: int
    first_row: int
    """Of the rows of the flat batch that these tiles have."""
    num_rows: int


class Scores(NamedTuple):
    """How a layer's scores become weights; sinks and slopes float32 [heads]."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


def rows_for(group: int, most_tokens: int) -> int:
    """BLOCK_M for sequences of up to `most_tokens` in this step: whole tokens, at least one."""
    rows: int = triton.next_power_of_2(max(DECODE_ROWS, group, min(most_tokens * group, PREFILL_ROWS)))
    return rows


def attend(query: Tensor, layer: Layer, batch: Batch, scores: Scores, out: Tensor) -> None:
    """Fills `out` from `query`, both [T, kv heads, group, d], contiguous; the step's keys are in their blocks."""
    rows, kv_heads, group, width = query.shape
    splits = batch.splits
    heads = kv_heads * group
    if splits > 1:
        parts = torch.empty((splits, rows, heads, width), dtype=torch.float32, device=query.device)
        weights = torch.empty((2, splits, rows, heads), dtype=torch.float32, device=query.device)
    else:
        parts = weights = out
    code = _code(layer)
    attention.attend[(len(batch.tile_sequence), kv_heads, splits)](
        query, out, parts, weights, layer.hot, _bits(layer.codes), _or(layer.scales, out),
        batch.tables, batch.table_starts, batch.query_starts, batch.context_lens,
        batch.tile_sequence, batch.tile_first, _or(scores.sinks, out), _or(scores.slopes, out),
        scores.scale, scores.softcap or 1.0, scores.window or 0, layer.hot.shape[0], rows,
        KV_HEADS=kv_heads, GROUP=group, SIZE=layer.hot.shape[3], WIDTH=width, BLOCK_D=triton.next_power_of_2(width),
        BLOCK_M=batch.rows_per_tile, BLOCK_N=BLOCK_N, SPLITS=splits, CODE=code,
        CAPPED=scores.softcap is not None, SINKS=scores.sinks is not None, SLOPES=scores.slopes is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", WIDE=not query.is_cuda,
    )  # fmt: skip
    if splits > 1:
        attention.merge[(batch.num_rows, heads)](
            parts, weights, out, batch.first_row, rows, HEADS=heads, WIDTH=width,
            BLOCK_D=triton.next_power_of_2(width), SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits),
        )  # fmt: skip


def write(key: Tensor, value: Tensor, slots: Tensor, hot: Tensor) -> None:
    """Stores `key` and `value` [T, kv heads, d], each row contiguous, at `slots` int64 [T] of `hot`."""
    tokens, kv_heads, width = key.shape
    blocks.write[(tokens,)](
        key, value, slots, hot, key.stride(0), value.stride(0),
        KV_HEADS=kv_heads, SIZE=hot.shape[3], WIDTH=width, BLOCK=triton.next_power_of_2(kv_heads * width),
    )  # fmt: skip


def compress(
    hot: Tensor, layers: Tensor, code: Tensor, scales: Tensor | None, codec: Codec | None, pairs: Tensor
) -> None:
    """Codes and scales of hot blocks, of the layers that share a codec; without one, copies.

    `hot` [all layers, blocks, 2, heads, size, d]; `layers` int64 [L]: which of them; `code` [L, cold, 2, heads, size,
    d]; `scales` float32 [L, cold, 2, heads]; `pairs` int64 [C, 2]: hot block, place among the cold ones.
    """
    count, sides, heads = code.shape[0], code.shape[2], code.shape[3]
    size = code.shape[4] * code.shape[5]
    blocks.compress[(len(pairs), count, sides * heads)](
        hot, _bits(code), _or(scales, hot), pairs, layers,
        hot.stride(0), code.stride(0), 0 if scales is None else scales.stride(0),
        1.0 if codec is None else codec.limit, SMALLEST_SCALE,
        ROWS=sides * heads, COUNT=size, BLOCK=triton.next_power_of_2(size), CODE=_codes_of(codec),
    )  # fmt: skip


def _code(layer: Layer) -> int:
    if not len(layer.codes):
        return 0
    return _codes_of(layer.codec)


def _codes_of(codec: Codec | None) -> int:
    return codes.PLAIN if codec is None else {INT8: codes.INT8, FP8: codes.E4M3}[codec]


def _bits(tensor: Tensor) -> Tensor:
    """e4m3's codes as the bytes that they are."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument must be some tensor, although it is not read."""
    return other if tensor is None else tensor
