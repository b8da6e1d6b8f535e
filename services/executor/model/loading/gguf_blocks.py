"""Blocks of GGUF tensors as codes and scales, bit for bit.

A row is blocks of 32 or 256 values: scales, and codes whose bits lie in planes. For each type a function takes the
blocks of some rows apart; what it returns is `QuantizedRows`, whose `dequantized` is what ggml makes of the blocks.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from services.executor.model.quantized import QuantizedRows
from services.executor.native.library import load_library

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values, which are halves"""
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def has_codes(kind: GGMLQuantizationType) -> bool:
    """Whether `quantized` reads the type."""
    return kind in _FORMATS


def quantized(raw: Tensor, kind: GGMLQuantizationType) -> QuantizedRows:
    """The weight whose rows are `raw`, uint8 [rows, bytes], by the native kernels where there are some for the type.
    Raises `ValueError` where its scales are no numbers."""
    library = load_library() if kind in _NATIVE and raw.stride(1) == 1 else None
    return by_torch(raw, kind) if library is None else _by_kernels(library, raw, kind)


def by_torch(raw: Tensor, kind: GGMLQuantizationType) -> QuantizedRows:
    """As `quantized`."""
    return _FORMATS[kind](_blocks(raw, GGML_QUANT_SIZES[kind][1]))


def values(raw: Tensor, kind: GGMLQuantizationType, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same as numbers [rows, values], of any type that ggml knows: plain ones as they are stored, codes in `dtype`
    (float32 or bf16) where the native kernels have them, others in float32.

    Raises `NotImplementedError` where the type is not known.
    """
    if kind in _PLAIN:
        return raw.contiguous().view(_PLAIN[kind])
    if kind in _FORMATS:
        weight = quantized(raw, kind)
        library = load_library()
        return weight.dequantized() if library is None or weight.table else _values(library, weight, dtype)
    return torch.from_numpy(dequantize(raw.contiguous().numpy(), kind))


def _by_kernels(library: Any, raw: Tensor, kind: GGMLQuantizationType) -> QuantizedRows:
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
def _first_block(kind: GGMLQuantizationType) -> QuantizedRows:
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


def _blocks(raw: Tensor, size: int) -> Tensor:
    """[rows, blocks, bytes of a block]"""
    return raw.view(raw.shape[0], -1, size)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: [rows, blocks]"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _rows(parts: Tensor) -> Tensor:
    return parts.reshape(parts.shape[0], -1)


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
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[..., at : at + 4].unsqueeze(-1) >> shifts) & 1).flatten(2) << 4


def _q4_0(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(_rows(_nibbles(blocks, 2)), 4, 32, _halves(blocks, 0), offset=8)


def _q4_1(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(_rows(_nibbles(blocks, 4)), 4, 32, _halves(blocks, 0), mins=-_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> QuantizedRows:
    codes = _nibbles(blocks, 6) | _fifth_bits(blocks, 2)
    return QuantizedRows(_rows(codes), 5, 32, _halves(blocks, 0), offset=16)


def _q5_1(blocks: Tensor) -> QuantizedRows:
    codes = _nibbles(blocks, 8) | _fifth_bits(blocks, 4)
    return QuantizedRows(_rows(codes), 5, 32, _halves(blocks, 0), mins=-_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(_rows(blocks[..., 2:] ^ 128), 8, 32, _halves(blocks, 0), offset=128)


def _iq4_nl(blocks: Tensor) -> QuantizedRows:
    return QuantizedRows(_rows(_nibbles(blocks, 2)), 4, 32, _halves(blocks, 0), table=_IQ4)


def _mxfp4(blocks: Tensor) -> QuantizedRows:
    exponent = blocks[..., 0].short()
    # Half of 2 ** (exponent - 127), by the bits of a bf16: below 2 ** -126 there is no exponent.
    bits = torch.where(exponent < 2, 0x20 << exponent.clamp(max=1), (exponent - 1) << 7)
    bits[exponent == 255] = 0x7FC0  # no number
    return QuantizedRows(_rows(_nibbles(blocks, 1)), 4, 32, bits.short().view(torch.bfloat16), table=_E2M1)


def _q2_k(blocks: Tensor) -> QuantizedRows:
    small = blocks[..., :16]
    return QuantizedRows(
        _rows(_plane(blocks[..., 16:80], 32, 2)),
        2,
        16,
        _rows(small & 15),
        mins=_rows(small >> 4),
        supers=_halves(blocks, 80),
        super_mins=_halves(blocks, 82),
        per=16,
    )


def _q3_k(blocks: Tensor) -> QuantizedRows:
    high, low = _plane(blocks[..., :32], 32, 1), _plane(blocks[..., 32:96], 32, 2)
    small = _plane(blocks[..., 96:104], 8, 4) | _plane(blocks[..., 104:108], 4, 2) << 4
    scales = (small.to(torch.int8) - 32).flatten(1)
    return QuantizedRows(_rows(low | high << 2), 3, 16, scales, offset=4, supers=_halves(blocks, 108), per=16)


def _with_minimums(blocks: Tensor, codes: Tensor, bits: int) -> QuantizedRows:
    """Of Q4_K and Q5_K: eight scales and minimums of six bits in twelve bytes."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return QuantizedRows(
        _rows(codes),
        bits,
        32,
        _rows(scales),
        mins=_rows(mins),
        supers=_halves(blocks, 0),
        super_mins=_halves(blocks, 2),
        per=8,
    )


def _q4_k(blocks: Tensor) -> QuantizedRows:
    return _with_minimums(blocks, _plane(blocks[..., 16:], 32, 4), 4)


def _q5_k(blocks: Tensor) -> QuantizedRows:
    high, low = _plane(blocks[..., 16:48], 32, 1), _plane(blocks[..., 48:], 32, 4)
    return _with_minimums(blocks, low | high << 4, 5)


def _q6_k(blocks: Tensor) -> QuantizedRows:
    low, high = _plane(blocks[..., :128], 64, 4), _plane(blocks[..., 128:192], 32, 2)
    scales = _rows(blocks[..., 192:208]).view(torch.int8)
    return QuantizedRows(
        _rows(low | high << 4), 6, 16, scales, offset=32, supers=_halves(blocks, 208), per=16
    )


def _iq4_xs(blocks: Tensor) -> QuantizedRows:
    shifts = torch.arange(0, 8, 4, dtype=torch.uint8)
    low = ((blocks[..., 4:8].unsqueeze(-1) >> shifts) & 15).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(2)
    scales = _rows((low | high << 4).to(torch.int8) - 32)
    codes = _plane(blocks[..., 8:], 16, 4)
    return QuantizedRows(_rows(codes), 4, 32, scales, table=_IQ4, supers=_halves(blocks, 0), per=8)


_FORMATS: dict[GGMLQuantizationType, Callable[[Tensor], QuantizedRows]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
    GGMLQuantizationType.MXFP4: _mxfp4,
}
_NATIVE = frozenset(
    GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
"""Those that `native/blocks.c` takes apart."""
