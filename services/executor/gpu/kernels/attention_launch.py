"""The kernels as functions of tensors.

What a launch does depends on shapes and on the host's numbers alone: nothing waits for the device, and a graph may
hold every launch. What varies between replays (lengths, tables, slots) lies in tensors.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from services.executor.gpu.kernels import attention, blocks, codes
from services.executor.gpu.kernels.tiles import LEAST_KEYS, scratch_numbers, tile_shape
from services.executor.kv_cache.codecs import SMALLEST_SCALE, Codec

NO_WINDOW = 1 << 30


class AttentionCall(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)


class AttentionLayer(NamedTuple):
    writable: Tensor  # [num_writable, 2, kv_heads, block_size, head_dim]
    codes: Tensor  # [num_quantized, 2, kv_heads, block_size, head_dim]
    scales: Tensor | None  # float32 [num_quantized, 2, kv_heads]; None: the quantized ones are as they are
    codec: Codec | None


class Batch(NamedTuple):
    """A step's sequences, on the device."""

    # int32 [T], of all rows of the step: where their keys and values are, block * block size + offset
    slots: Tensor
    tables: Tensor  # int32, one after the other
    table_starts: Tensor  # int32 [S]
    query_starts: Tensor  # int32 [S + 1]
    context_lens: Tensor  # int32 [S]
    tile_sequence: Tensor
    tile_first: Tensor
    rows_per_tile: int  # BLOCK_M
    splits: int
    first_row: int  # of the rows of the flat batch that these tiles have
    num_rows: int
    # float32, `scratch_numbers` of it or more, where there are splits; None: allocated by each launch.
    scratch: Tensor | None = None
    tile_tokens: int = 0  # tokens of a tile; 0: as many as its rows hold
    head_stride: int = 0  # from the table of one KV head to that of the next; 0: all read the same
    # int32 [2], on the device: which of these rows the parts of keys are put together for; None: all.
    rows: Tensor | None = None


class ScoreOptions(NamedTuple):
    """How a layer's scores become weights; sinks and slopes float32 [heads]."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    first: int = 0  # keys at positions before it are seen by their own rows alone


def attend(query: Tensor, layer: AttentionLayer, batch: Batch, scores: ScoreOptions, out: Tensor) -> None:
    """Fills `out` from `query`, both [T, kv heads, group, d], contiguous; the step's keys are in their blocks."""
    for call in attend_calls(query, layer, batch, scores, out):
        call.run()


def attend_calls(
    query: Tensor, layer: AttentionLayer, batch: Batch, scores: ScoreOptions, out: Tensor
) -> list[AttentionCall]:
    kv_heads, group, width = query.shape[1:]
    heads, splits = kv_heads * group, batch.splits
    parts, weights = _scratch(batch, heads, width, out)
    _refuse_too_many(layer)
    code = code_of(layer)
    shape = tile_shape(batch.rows_per_tile, width, query.dtype.itemsize, code != 0)
    padded = triton.next_power_of_2(width)
    # A decode waits for memory where codes are taken apart fast enough; a prefill's matrix products want whole ones.
    by_words = code not in (0, codes.PLAIN) and batch.rows_per_tile <= 32 and width == padded >= 64
    arguments = {
        "query": query, "out": out, "parts": parts, "weights": weights,
        "writable": layer.writable, "codes": readable(layer.codes),
        "words": layer.codes.view(torch.int32) if by_words else out, "scales": _or(layer.scales, out),
        "slots": batch.slots, "tables": batch.tables, "table_starts": batch.table_starts, "query_starts": batch.query_starts,
        "context_lens": batch.context_lens, "tile_sequence": batch.tile_sequence, "tile_first": batch.tile_first,
        "sinks": _or(scores.sinks, out), "slopes": _or(scores.slopes, out),
        "scale": float(scores.scale), "softcap": float(scores.softcap or 1.0), "window": scores.window or NO_WINDOW,
        "num_writable": layer.writable.shape[0], "first_row": batch.first_row, "num_rows": batch.num_rows, "splits": splits,
        "head_stride": batch.head_stride,
    }  # fmt: skip
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "SIZE": layer.writable.shape[3], "WIDTH": width, "BLOCK_D": padded,
        "TOKENS": batch.tile_tokens or batch.rows_per_tile // group, "BLOCK_M": batch.rows_per_tile, "BLOCK_N": shape.keys, "EDGE": shape.edge, "SPLIT": splits > 1,
        "LEAST": max(1, LEAST_KEYS // shape.keys), "CODE": code,
        "CAPPED": scores.softcap is not None, "WINDOWED": bool(scores.window or scores.first), "FIRST": scores.first,
        "SINKS": scores.sinks is not None, "SLOPES": scores.slopes is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "WIDE": query.device.type == "cpu",
        "HALF": query.dtype != torch.float32 and query.device.type != "cpu",
        "WORDS": by_words, "STAGES": shape.stages, "WRITABLE_STAGES": shape.writable_stages,
    }  # fmt: skip
    grid = (len(batch.tile_sequence), kv_heads, splits)
    calls = [AttentionCall(attention.attend, grid, arguments, constants, shape.warps, shape.stages)]
    if splits > 1:
        given = {name: arguments[name] for name in ("parts", "weights", "out", "first_row", "num_rows", "splits")}
        given["rows"] = _or(batch.rows, out)
        sizes = {"HEADS": heads, "WIDTH": width, "BLOCK_D": padded, "BOUNDED": batch.rows is not None}
        sizes["BLOCK_S"] = triton.next_power_of_2(splits)
        calls.append(AttentionCall(attention.merge, (batch.num_rows, heads), given, sizes))
    return calls


def write(key: Tensor, value: Tensor, slots: Tensor, writable: Tensor) -> None:
    """Stores `key` and `value` [T, kv heads, d], each row contiguous, at `slots` int32 or int64 [T] of `writable`; a row
    whose slot is below 0 goes nowhere."""
    write_call(key, value, slots, writable).run()


def write_call(key: Tensor, value: Tensor, slots: Tensor, writable: Tensor) -> AttentionCall:
    tokens, kv_heads, width = key.shape
    arguments = {
        "key": key, "value": value, "slots": slots, "writable": writable,
        "key_stride": key.stride(0), "value_stride": value.stride(0),
    }  # fmt: skip
    sizes = {"KV_HEADS": kv_heads, "SIZE": writable.shape[3], "WIDTH": width}
    sizes["BLOCK"] = triton.next_power_of_2(kv_heads * width)
    return AttentionCall(blocks.write, (tokens,), arguments, sizes)


def compress(
    writable: Tensor, layers: Tensor, code: Tensor, scales: Tensor | None, codec: Codec | None, pairs: Tensor
) -> None:
    """Codes and scales of writable blocks, of the layers that share a codec; without one, copies.

    `writable` [all layers, blocks, 2, heads, size, d]; `layers` int64 [L]: which of them; `code` [L, quantized, 2, heads, size,
    d]; `scales` float32 [L, quantized, 2, heads]; `pairs` int64 [C, 2]: writable block, place among the quantized ones.
    """
    compress_call(writable, layers, code, scales, codec, pairs).run()


def compress_layer(layer: AttentionLayer, pairs: Tensor, first: Tensor) -> None:
    """`compress` in one layer; `first` int64 [1]: zero, on the device."""
    scales = None if layer.scales is None else layer.scales.unsqueeze(0)
    compress(layer.writable.unsqueeze(0), first, layer.codes.unsqueeze(0), scales, layer.codec, pairs)


def compress_call(
    writable: Tensor, layers: Tensor, code: Tensor, scales: Tensor | None, codec: Codec | None, pairs: Tensor
) -> AttentionCall:
    count, sides, heads = code.shape[0], code.shape[2], code.shape[3]
    size = code.shape[4] * code.shape[5]
    arguments = {
        "writable": writable, "codes": _bits(code), "scales": _or(scales, writable), "pairs": pairs, "layers": layers,
        "writable_layer_stride": writable.stride(0), "code_layer_stride": code.stride(0),
        "scale_layer_stride": 0 if scales is None else scales.stride(0),
        "limit": 1.0 if codec is None else codec.limit, "smallest": SMALLEST_SCALE,
    }  # fmt: skip
    sizes = {"ROWS": sides * heads, "COUNT": size, "BLOCK": triton.next_power_of_2(size), "CODE": _codes_of(codec)}
    return AttentionCall(blocks.compress, (len(pairs), count, sides * heads), arguments, sizes)


def _scratch(batch: Batch, heads: int, width: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Where `attend` leaves parts and their weights."""
    needed = scratch_numbers(batch.splits, batch.num_rows, heads, width)
    if not needed:
        return out, out
    scratch = batch.scratch
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=out.device)
    elif scratch.numel() < needed:
        raise ValueError(
            f"{batch.splits} parts of {batch.num_rows} rows need a scratch of {needed} numbers, not {scratch.numel()}; "
            "size it by scratch_numbers"
        )
    sums = needed // (width + 2) * width
    return scratch[:sums], scratch[sums:needed]


def _refuse_too_many(layer: AttentionLayer) -> None:
    """Kernels count lines, of one token's numbers, in 32 bits."""
    for shape in (layer.writable.shape, layer.codes.shape):
        if shape[:-1].numel() >= 1 << 31:
            raise ValueError(
                f"{shape[0]} blocks of {shape[3]} tokens for {shape[2]} heads are more than kernels can count; "
                "give the KV cache less memory"
            )


def code_of(layer: AttentionLayer) -> int:
    """How kernels know what its blocks are kept as: CODE; 0: all of them are writable."""
    return _codes_of(layer.codec) if len(layer.codes) else 0


def _codes_of(codec: Codec | None) -> int:
    return codes.PLAIN if codec is None else codec.number


def readable(tensor: Tensor) -> Tensor:
    """Codes as the kernels read them: a GPU knows e4m3, the interpreter does not."""
    return _bits(tensor) if tensor.device.type == "cpu" else tensor


def _bits(tensor: Tensor) -> Tensor:
    """e4m3's codes as the bytes that they are."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument must be some tensor, although it is not read."""
    return other if tensor is None else tensor
