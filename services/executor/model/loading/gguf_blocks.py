"""Blocks of GGUF tensors as codes and scales, bit for bit, there and back.

A row is blocks of 32 or 256 values: scales, and codes whose bits lie in planes. For each type a function takes the
blocks of some rows apart; what it returns is `QuantizedRows`, whose `dequantized` is what ggml makes of the blocks.
Another puts them together of rows that a codec has quantized.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.loading import gguf_grids
from services.executor.model.loading.gguf_grids import bits_of, flat, halves_of, parts_of
from services.executor.model.quantized import E2M1, QuantizedRows, half_powers
from services.executor.model.quantizing import CODECS, RowsCodec
from services.executor.native.library import load_library

Bytes = NDArray[np.uint8]
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def has_codes(kind: Type) -> bool:
    """Whether `quantized` reads the type."""
    return kind in BLOCKS


def quantized(raw: Tensor, kind: Type) -> QuantizedRows:
    """The weight whose rows are `raw`, uint8 [rows, bytes], by the native kernels where there are some for the type.
    Raises `ValueError` where its scales are no numbers."""
    library = load_library() if BLOCKS[kind].native and raw.stride(1) == 1 else None
    return by_torch(raw, kind) if library is None else _by_kernels(library, raw, kind)


def by_torch(raw: Tensor, kind: Type) -> QuantizedRows:
    """As `quantized`."""
    return BLOCKS[kind].read(raw.view(raw.shape[0], -1, GGML_QUANT_SIZES[kind][1]))


def values(raw: Tensor, kind: Type, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same as numbers [rows, values], of any type that ggml knows: plain ones as they are stored, codes in `dtype`
    (float32 or bf16) where the native kernels have them, others in float32.

    Raises `NotImplementedError` where the type is not known.
    """
    if kind in _PLAIN:
        return raw.contiguous().view(_PLAIN[kind])
    if kind in BLOCKS:
        weight = quantized(raw, kind)
        library = load_library()
        return weight.dequantized() if library is None or weight.table else _values(library, weight, dtype)
    return torch.from_numpy(dequantize(raw.contiguous().numpy(), kind))


def _by_kernels(library: Any, raw: Tensor, kind: Type) -> QuantizedRows:
    size, like = GGML_QUANT_SIZES[kind][1], _first_block(kind)
    rows, blocks = raw.shape[0], raw.shape[1] // size
    made = {
        name: torch.empty(rows, part.shape[1] * blocks, dtype=part.dtype)
        for name in _PARTS
        if (part := getattr(like, name)) is not None
    }
    places = [made[name].data_ptr() if name in made else None for name in _PARTS]
    library.rz_block_codes(int(kind), raw.data_ptr(), raw.stride(0), rows, blocks, size, *places)
    return replace(like, **made)  # type: ignore[arg-type]


_PARTS = ("codes", "scales", "mins", "supers", "super_mins")


@cache
def _first_block(kind: Type) -> QuantizedRows:
    """A block of zeros: the format."""
    return by_torch(torch.zeros(1, GGML_QUANT_SIZES[kind][1], dtype=torch.uint8), kind)


def _values(library: Any, weight: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """`weight.dequantized()` in `dtype`, of what has neither a table nor zero points nor a permutation."""
    dtype = dtype if dtype is torch.bfloat16 else torch.float32
    made = torch.empty(weight.codes.shape, dtype=dtype)
    codes = weight.codes.contiguous()
    scales, mins = (None if part is None else part.contiguous() for part in weight.level_scales())
    assert scales is not None, "a weight has scales"
    library.rz_code_values(
        codes.data_ptr(),
        scales.data_ptr(),
        None if mins is None else mins.data_ptr(),
        *(weight.outputs, weight.groups, weight.group, weight.offset),
        *(made.data_ptr(), dtype is torch.float32, made.stride(0)),
    )
    return made


def _plane(data: Tensor, width: int, bits: int) -> Tensor:
    """Codes of `bits` bits, [rows, blocks, codes]: of `width` bytes the lowest bits, then those above, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    runs = data.reshape(*data.shape[:2], -1, 1, width) >> shifts.view(-1, 1)
    codes: Tensor = runs & ((1 << bits) - 1)
    return codes.flatten(2)


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    return _plane(blocks[..., at : at + 16], 16, 4)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit j of four bytes belongs to value j."""
    return bits_of(blocks[..., at : at + 4]).flatten(2) << 4


def _q4_0(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(flat(_nibbles(blocks, 2)), 4, 32, halves_of(blocks, 0), offset=8)


def _q4_1(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(flat(_nibbles(blocks, 4)), 4, 32, halves_of(blocks, 0), mins=-halves_of(blocks, 2))


def _q5_0(blocks: Tensor) -> QuantizedRows:
    codes = _nibbles(blocks, 6) | _fifth_bits(blocks, 2)
    return QuantizedRows(flat(codes), 5, 32, halves_of(blocks, 0), offset=16)


def _q5_1(blocks: Tensor) -> QuantizedRows:
    codes = _nibbles(blocks, 8) | _fifth_bits(blocks, 4)
    return QuantizedRows(flat(codes), 5, 32, halves_of(blocks, 0), mins=-halves_of(blocks, 2))


def _q8_0(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(flat(blocks[..., 2:] ^ 128), 8, 32, halves_of(blocks, 0), offset=128)


def _iq4_nl(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(flat(_nibbles(blocks, 2)), 4, 32, halves_of(blocks, 0), table=_IQ4)


def _mxfp4(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(flat(_nibbles(blocks, 1)), 4, 32, half_powers(blocks[..., 0]), table=E2M1)


def _q2_k(blocks: Tensor) -> QuantizedRows:
    small = blocks[..., :16]
    return QuantizedRows(
        flat(_plane(blocks[..., 16:80], 32, 2)),
        2,
        16,
        flat(small & 15),
        mins=flat(small >> 4),
        supers=halves_of(blocks, 80),
        super_mins=halves_of(blocks, 82),
        per=16,
    )


def _q3_k(blocks: Tensor) -> QuantizedRows:
    high, low = _plane(blocks[..., :32], 32, 1), _plane(blocks[..., 32:96], 32, 2)
    small = _plane(blocks[..., 96:104], 8, 4) | _plane(blocks[..., 104:108], 4, 2) << 4
    scales = (small.to(torch.int8) - 32).flatten(1)
    return QuantizedRows(flat(low | high << 2), 3, 16, scales, offset=4, supers=halves_of(blocks, 108), per=16)


def _with_minimums(blocks: Tensor, codes: Tensor, bits: int) -> QuantizedRows:
    """Of Q4_K and Q5_K: eight scales and minimums of six bits in twelve bytes."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return QuantizedRows(
        flat(codes),
        bits,
        32,
        flat(scales),
        mins=flat(mins),
        supers=halves_of(blocks, 0),
        super_mins=halves_of(blocks, 2),
        per=8,
    )


def _q4_k(blocks: Tensor) -> QuantizedRows:
    return _with_minimums(blocks, _plane(blocks[..., 16:], 32, 4), 4)


def _q5_k(blocks: Tensor) -> QuantizedRows:
    high, low = _plane(blocks[..., 16:48], 32, 1), _plane(blocks[..., 48:], 32, 4)
    return _with_minimums(blocks, low | high << 4, 5)


def _q6_k(blocks: Tensor) -> QuantizedRows:
    low, high = _plane(blocks[..., :128], 64, 4), _plane(blocks[..., 128:192], 32, 2)
    scales = flat(blocks[..., 192:208]).view(torch.int8)
    return QuantizedRows(flat(low | high << 4), 6, 16, scales, offset=32, supers=halves_of(blocks, 208), per=16)


def _iq4_xs(blocks: Tensor) -> QuantizedRows:
    low, high = parts_of(blocks[..., 4:8], 4), parts_of(blocks[..., 2:4], 2)
    scales = flat((low | high << 4).to(torch.int8) - 32)
    codes = _plane(blocks[..., 8:], 16, 4)
    return QuantizedRows(flat(codes), 4, 32, scales, table=_IQ4, supers=halves_of(blocks, 0), per=8)


def _pack_q2_k(rows: QuantizedRows) -> Bytes:
    """16 + 64 + 4 bytes for 256 values: scales and minimums of 4 bits, codes, two float16."""
    assert rows.mins is not None
    blocks = rows.codes.numel() // 256
    scales = rows.scales.numpy() | (rows.mins.numpy() << 4)
    codes = _pairs_of_bits(rows.codes.numpy().reshape(blocks, 2, 4, 32))
    return np.concatenate(
        [scales.reshape(blocks, 16), codes, *_float16((rows.supers, rows.super_mins), blocks)], axis=1
    )


def _pack_q3_k(rows: QuantizedRows) -> Bytes:
    """32 + 64 + 12 + 2 bytes for 256 values: upper bits, lower two, 16 scales of 6 bits (32 more), float16."""
    blocks = rows.codes.numel() // 256
    codes = rows.codes.numpy().reshape(blocks, 8, 32)
    low = _pairs_of_bits((codes & 3).reshape(blocks, 2, 4, 32))
    scales = (rows.scales.numpy().reshape(blocks, 2, 8) + 32).astype(np.uint8)
    nibbles = (scales[:, 0] & 15) | ((scales[:, 1] & 15) << 4)
    fours = scales.reshape(blocks, 4, 4) >> 4
    upper = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    return np.concatenate([_single_bits(codes >> 2), low, nibbles, upper, *_float16((rows.supers,), blocks)], axis=1)


def _pack_q4_k(rows: QuantizedRows) -> Bytes:
    """128 + 16 bytes for 256 values (Q5_K: 32 more): two float16, 8 scales and 8 minimums of 6 bits, the fifth bits,
    nibbles."""
    assert rows.mins is not None
    blocks = rows.codes.numel() // 256
    scales, mins = rows.scales.numpy().reshape(blocks, 8), rows.mins.numpy().reshape(blocks, 8)
    low = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    middle = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    high = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    codes = rows.codes.numpy().reshape(blocks, 4, 2, 32)
    fifth = [_single_bits(codes.reshape(blocks, 8, 32) >> 4)] if rows.bits == 5 else []
    nibbles = (codes[:, :, 0] & 15) | ((codes[:, :, 1] & 15) << 4)
    halves = _float16((rows.supers, rows.super_mins), blocks)
    return np.concatenate([*halves, low, middle, high, *fifth, nibbles.reshape(blocks, 128)], axis=1)


def _pack_q6_k(rows: QuantizedRows) -> Bytes:
    """128 + 64 + 16 + 2 bytes for 256 values: nibbles, upper two bits, signed scales, float16."""
    blocks = rows.codes.numel() // 256
    codes = rows.codes.numpy().reshape(blocks, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | ((codes[:, :, 2:] & 15) << 4)
    scales = rows.scales.numpy().view(np.uint8).reshape(blocks, 16)
    high = _pairs_of_bits(codes >> 4)
    return np.concatenate([low.reshape(blocks, 128), high, scales, *_float16((rows.supers,), blocks)], axis=1)


def _single_bits(codes: NDArray[Any]) -> Bytes:
    """[blocks, 8, 32] of one bit to [blocks, 32]: a bit of each eighth in a byte."""
    return np.packbits(codes, axis=1, bitorder="little").reshape(len(codes), 32)


def _pairs_of_bits(codes: NDArray[Any]) -> Bytes:
    """[blocks, 2, 4, 32] of two bits to [blocks, 64]: of each half, two bits of each quarter in a byte."""
    joined: Bytes = codes[:, :, 0] | (codes[:, :, 1] << 2) | (codes[:, :, 2] << 4) | (codes[:, :, 3] << 6)
    return joined.reshape(len(codes), 64)


def _float16(values: Sequence[Tensor | None], blocks: int) -> list[Bytes]:
    assert all(one is not None for one in values), "of two levels"
    return [one.contiguous().numpy().view(np.uint8).reshape(blocks, 2) for one in values if one is not None]


@dataclass(frozen=True)
class GgufBlock:
    """A type of blocks whose weights are kept as codes."""

    read: Callable[[Tensor], QuantizedRows]  # of uint8 [rows, blocks, bytes of a block]
    native: bool = False  # `native/blocks.c` takes them apart
    # What quantizes rows that are packed so; None: the package `gguf` writes them.
    codec: RowsCodec | None = None
    # uint8 [blocks, bytes of a block] of rows of that codec
    pack: Callable[[QuantizedRows], Bytes] | None = None


# Others are unpacked when they are read.
BLOCKS = {
    Type.Q4_0: GgufBlock(_q4_0, native=True),
    Type.Q4_1: GgufBlock(_q4_1, native=True),
    Type.Q5_0: GgufBlock(_q5_0, native=True),
    Type.Q5_1: GgufBlock(_q5_1, native=True),
    Type.Q8_0: GgufBlock(_q8_0, native=True),
    Type.Q2_K: GgufBlock(_q2_k, codec=replace(CODECS["q4_k"], name="q2_k", bits=2, group=16), pack=_pack_q2_k),
    Type.Q3_K: GgufBlock(_q3_k, codec=replace(CODECS["q6_k"], name="q3_k", bits=3), pack=_pack_q3_k),
    Type.Q4_K: GgufBlock(_q4_k, native=True, codec=CODECS["q4_k"], pack=_pack_q4_k),
    Type.Q5_K: GgufBlock(_q5_k, native=True, codec=replace(CODECS["q4_k"], name="q5_k", bits=5), pack=_pack_q4_k),
    Type.Q6_K: GgufBlock(_q6_k, native=True, codec=CODECS["q6_k"], pack=_pack_q6_k),
    Type.IQ4_NL: GgufBlock(_iq4_nl),
    Type.IQ4_XS: GgufBlock(_iq4_xs),
    Type.MXFP4: GgufBlock(_mxfp4),
    Type.NVFP4: GgufBlock(gguf_grids.nvfp4),
    Type.IQ1_S: GgufBlock(gguf_grids.iq1_s),
    Type.IQ1_M: GgufBlock(gguf_grids.iq1_m),
    Type.IQ2_XXS: GgufBlock(gguf_grids.iq2_xxs),
    Type.IQ2_XS: GgufBlock(gguf_grids.iq2_xs),
    Type.IQ2_S: GgufBlock(gguf_grids.iq2_s),
    Type.IQ3_XXS: GgufBlock(gguf_grids.iq3_xxs),
    Type.IQ3_S: GgufBlock(gguf_grids.iq3_s),
    Type.TQ1_0: GgufBlock(gguf_grids.tq1_0),
    Type.TQ2_0: GgufBlock(gguf_grids.tq2_0),
}
