"""The kernels of products as functions of tensors, and the tiles that they get."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.executor.gpu.kernels import matmul
from services.executor.gpu.kernels.codes import E4M3, INT8, PLAIN
from services.executor.kv_cache.codecs import FP8, SMALLEST_SCALE, Codec

MOST_ROWS = 128
"""Of `multiply_few`: beyond, its tiles would read the weights again and again."""
BLOCK_N = 64
"""Outputs of a tile: the rows that a group of four warps multiplies at once on Hopper."""
BLOCK_K = 128
STAGES = 4
"""Tiles of weights on their way: 4 of 8 KB, and two programs on a processor, are twice what must be on its way to keep
4.8 TB/s busy for 700 ns on 132 processors."""
ONE_ROW_N, ONE_ROW_K = 16, 512
"""Rows and bytes of a tile of `one_row`: 8 KB too."""
LEAST_SHARE = 4
"""Tiles along the inputs that a split has at least: fewer, and adding the splits up costs more than it gains."""
PROGRAMS = 2
"""That a processor should have."""
BATCH_INVARIANT_ROWS = 64
"""Rows of activations in a tile of `multiply_alike`: those of decoding are few, those of prompts many."""
BATCH_INVARIANT_PROCESSORS = 132
"""For which its splits are chosen, an H200's: another number would be another order of sums."""
DECODED = 2048
"""Numbers that a program of `decode_rows` widens."""


class Tiles(NamedTuple):
    """How a product of few rows is cut."""

    block_t: int
    groups: int
    """Tiles along the rows of activations."""
    tiles: int
    """Along the outputs."""
    splits: int


def tiles_of(rows: int, outputs: int, inputs: int, processors: int) -> Tiles:
    """For `rows`, 1 to `MOST_ROWS`: as many splits as give each processor its programs."""
    block_t = min(max(16, 1 << (rows - 1).bit_length()), 64)
    groups, tiles = -(-rows // block_t), -(-outputs // BLOCK_N)
    wanted = -(-PROGRAMS * processors // (groups * tiles))
    most = max(1, inputs // (LEAST_SHARE * BLOCK_K))
    return Tiles(block_t, groups, tiles, min(wanted, most))


def arrivals_for(outputs: int, device: torch.device) -> Tensor:
    """What `multiply_few` counts in, for weights of so many `outputs`."""
    return torch.zeros(-(-outputs // BLOCK_N) * -(-MOST_ROWS // 16), dtype=torch.int32, device=device)


def multiply_few(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, arrivals: Tensor, processors: int
) -> Tensor:
    """`x` [T, in], T at most `MOST_ROWS`, times `codes` [out, in] with `scales` float32 [out], plus `bias`: [T, out].

    `arrivals` belongs to this weight; no two products with it may run at the same time.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    outputs = len(codes)
    if rows == 1:
        return multiply_one(x, codes, scales, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    shared = {"CODE": _code(codes), "BIAS": bias is not None, "WIDE": x.device.type == "cpu"}
    addend = scales if bias is None else bias
    if rows:
        cut = tiles_of(rows, outputs, inputs, processors)
        parts = out
        if cut.splits > 1:
            parts = torch.empty((cut.splits, rows, outputs), dtype=torch.float32, device=x.device)
        matmul.few_rows[(cut.groups, cut.tiles, cut.splits)](
            x, _bits(codes), scales, addend, out, parts, arrivals, rows, outputs, inputs, x.stride(0), cut.splits,
            BLOCK_T=cut.block_t, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, SPLIT=cut.splits > 1, num_stages=STAGES, **shared,
        )  # fmt: skip
    return out


def multiply_alike(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, arrivals: Tensor
) -> Tensor:
    """`x` [T, in] times `weight` [out, in], plus `bias`: [T, out], each row with the bits that it has alone.

    Tiles and splits are those of `BATCH_INVARIANT_ROWS` rows on `BATCH_INVARIANT_PROCESSORS`, whatever there is. Rows
    are multiplied `MOST_ROWS` at a time, for the splits' sums take memory. Without `scales` `weight` is in `x`'s dtype.
    `arrivals` as of `multiply_few`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    outputs, inputs = weight.shape
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    code, values = (PLAIN, weight) if scales is None else (_code(weight), _bits(weight))
    cut = tiles_of(BATCH_INVARIANT_ROWS, outputs, inputs, BATCH_INVARIANT_PROCESSORS)
    for first in range(0, len(x), MOST_ROWS):
        part, into = x[first : first + MOST_ROWS], out[first : first + MOST_ROWS]
        rows, parts = len(part), out
        if cut.splits > 1:
            parts = torch.empty((cut.splits, rows, outputs), dtype=torch.float32, device=x.device)
        matmul.few_rows[(triton.cdiv(rows, cut.block_t), cut.tiles, cut.splits)](
            part, values, out if scales is None else scales, out if bias is None else bias, into, parts, arrivals,
            rows, outputs, inputs, part.stride(0), cut.splits,
            BLOCK_T=cut.block_t, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K // values.element_size(), SPLIT=cut.splits > 1,
            num_stages=STAGES, CODE=code, BIAS=bias is not None, WIDE=x.device.type == "cpu",
        )  # fmt: skip
    return out


def multiply_one(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """`multiply_few` of one row; without `scales` by `weight` [out, in] in `x`'s dtype."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    code, values = (PLAIN, weight) if scales is None else (_code(weight), _bits(weight))
    matmul.one_row[(triton.cdiv(outputs, ONE_ROW_N),)](
        x, values, out if scales is None else scales, out if bias is None else bias, out, outputs, inputs,
        BLOCK_N=ONE_ROW_N, BLOCK_K=ONE_ROW_K // values.element_size(), STAGES=STAGES,
        CODE=code, BIAS=bias is not None, WIDE=x.device.type == "cpu",
    )  # fmt: skip
    return out


def encode_rows(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """(codes [T, in] of `codec`, scales float32 [T]) of `x` [T, in]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=codec.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(inputs)
        matmul.encode_rows[(rows,)](
            x, _bits(codes), scales, inputs, x.stride(0), codec.limit, SMALLEST_SCALE,
            BLOCK=block, CODE=_code(codes), num_warps=max(1, min(block // 1024, 16)),
        )  # fmt: skip
    return codes, scales


def decode_rows(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fills `out` [rows, in], contiguous, from `codes` [rows, in] and `scales` float32 [rows]."""
    rows, inputs = codes.shape
    if rows:
        matmul.decode_rows[(rows, triton.cdiv(inputs, DECODED))](
            _bits(codes), scales, out, inputs, BLOCK=DECODED, CODE=_code(codes)
        )


def _code(codes: Tensor) -> int:
    return E4M3 if codes.dtype == FP8.dtype else INT8


def _bits(codes: Tensor) -> Tensor:
    """e4m3's codes as the bytes that they are."""
    return codes.view(torch.int8)
