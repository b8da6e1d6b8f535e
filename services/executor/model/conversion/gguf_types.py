"""Which of GGUF's types each tensor gets, and its rows as bytes of that type.

github.com/ggml-org/llama.cpp: ggml/src/ggml-common.h has the blocks, src/llama-quant.cpp the mixtures
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS, RowsCodec

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class GgufDtype:
    """What `--dtype` means for a GGUF file."""

    name: str
    matrices: Type
    vocabulary: Type
    """Of embedding and head."""
    file_type: int
    mixed: Mapping[str, tuple[Type, Type]] = field(default_factory=dict)
    """Weights of layers that get other types: in the layers where more bits count, and in the others"""


def _mixed(plain: Type, fused: Type) -> Mapping[str, tuple[Type, Type]]:
    """`fused`: of queries, keys and values in one matrix"""
    return {**dict.fromkeys(("attn_v", "ffn_down"), (Type.Q6_K, plain)), "attn_qkv": (fused, fused)}


def _wider(others: Type, values: Type) -> Mapping[str, tuple[Type, Type]]:
    names = dict.fromkeys(("attn_output", "attn_qkv", "ffn_down"), others) | {"attn_v": values}
    return {name: (kind, kind) for name, kind in names.items()}


_FILE_TYPES = gguf.LlamaFileType
DTYPES = {
    dtype.name: dtype
    for dtype in (
        GgufDtype("f32", Type.F32, Type.F32, _FILE_TYPES.ALL_F32),
        GgufDtype("f16", Type.F16, Type.F16, _FILE_TYPES.MOSTLY_F16),
        GgufDtype("bf16", Type.BF16, Type.BF16, _FILE_TYPES.MOSTLY_BF16),
        GgufDtype("q8_0", Type.Q8_0, Type.Q8_0, _FILE_TYPES.MOSTLY_Q8_0),
        GgufDtype("q6_k", Type.Q6_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q6_K),
        GgufDtype("q5_1", Type.Q5_1, Type.Q8_0, _FILE_TYPES.MOSTLY_Q5_1),
        GgufDtype("q5_0", Type.Q5_0, Type.Q8_0, _FILE_TYPES.MOSTLY_Q5_0),
        GgufDtype("q5_k_m", Type.Q5_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q5_K_M, _mixed(Type.Q5_K, Type.Q6_K)),
        GgufDtype("q5_k_s", Type.Q5_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q5_K_S),
        GgufDtype("q4_k_m", Type.Q4_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q4_K_M, _mixed(Type.Q4_K, Type.Q5_K)),
        GgufDtype("q4_k_s", Type.Q4_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q4_K_S),
        GgufDtype("q4_1", Type.Q4_1, Type.Q8_0, _FILE_TYPES.MOSTLY_Q4_1),
        GgufDtype("q4_0", Type.Q4_0, Type.Q8_0, _FILE_TYPES.MOSTLY_Q4_0),
        GgufDtype("q3_k_m", Type.Q3_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q3_K_M, _wider(Type.Q4_K, Type.Q4_K)),
        GgufDtype("q2_k", Type.Q2_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q2_K, _wider(Type.Q3_K, Type.Q4_K)),
    )
}

_COARSER = {
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}
"""What rows get that are no multiple of 256 values, as in llama.cpp (which has IQ4_NL for Q4_0)."""
_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.")


def type_of(name: str, shape: tuple[int, ...], dtype: GgufDtype, layers: int) -> Type:
    """The type of the tensor `name` (GGUF's) of `shape`; vectors stay float32."""
    if len(shape) < 2:
        return Type.F32
    wanted = dtype.matrices
    if name in ("token_embd.weight", "output.weight"):
        wanted = dtype.vocabulary
    elif (found := _OF_LAYER.match(name)) and found[2] in dtype.mixed:
        more, others = dtype.mixed[found[2]]
        wanted = more if _gets_more_bits(int(found[1]), layers) else others
    if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        wanted = _COARSER.get(wanted, wanted)
    return Type.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def _gets_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice: the first and last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def nbytes_of(shape: tuple[int, ...], kind: Type) -> int:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // int(values) * int(size)


def encoded(rows: Tensor, kind: Type) -> NDArray[np.generic]:
    """The bytes of `rows` [..., in] of any floating dtype."""
    block = _BLOCKS.get(kind)
    if block is not None:
        codec, pack = block
        weight = rows.reshape(-1, rows.shape[-1])
        room = codec.empty(*weight.shape)
        codec.encode_into(room, weight)
        return pack(room)
    if kind is Type.BF16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind is Type.F16:
        return rows.to(torch.float16).contiguous().numpy()
    values: NDArray[np.generic] = gguf.quantize(rows.float().contiguous().numpy(), kind)
    return values


def _q2_k(rows: QuantizedRows) -> Bytes:
    """16 + 64 + 4 bytes for 256 values: scales and minimums of 4 bits, codes, two float16."""
    assert rows.mins is not None
    blocks = rows.codes.numel() // 256
    scales = rows.scales.numpy() | (rows.mins.numpy() << 4)
    codes = _pairs_of_bits(rows.codes.numpy().reshape(blocks, 2, 4, 32))
    return np.concatenate(
        [scales.reshape(blocks, 16), codes, *_float16((rows.supers, rows.super_mins), blocks)], axis=1
    )


def _q3_k(rows: QuantizedRows) -> Bytes:
    """32 + 64 + 12 + 2 bytes for 256 values: upper bits, lower two, 16 scales of 6 bits (32 more), float16."""
    blocks = rows.codes.numel() // 256
    codes = rows.codes.numpy().reshape(blocks, 8, 32)
    low = _pairs_of_bits((codes & 3).reshape(blocks, 2, 4, 32))
    scales = (rows.scales.numpy().reshape(blocks, 2, 8) + 32).astype(np.uint8)
    nibbles = (scales[:, 0] & 15) | ((scales[:, 1] & 15) << 4)
    fours = scales.reshape(blocks, 4, 4) >> 4
    upper = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    return np.concatenate(
        [_single_bits(codes >> 2), low, nibbles, upper, *_float16((rows.supers,), blocks)], axis=1
    )


def _q4_k(rows: QuantizedRows) -> Bytes:
    """128 + 16 bytes for 256 values (Q5_K: 32 more): two float16, 8 scales and 8 minimums of 6 bits, the fifth bits,
    nibbles."""
    assert rows.mins is not None
    blocks = rows.codes.numel() // 256
    scales, mins = rows.scales.numpy().reshape(blocks, 8), rows.mins.numpy().reshape(blocks, 8)
    low = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    middle = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    high = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    codes = rows.codes.numpy().reshape(blocks, 4, 2, 32)
    fifth = [_single_bits(codes.reshape(blocks, 8, 32) >> 4)] if rows.bits == _FIVE else []
    nibbles = (codes[:, :, 0] & 15) | ((codes[:, :, 1] & 15) << 4)
    halves = _float16((rows.supers, rows.super_mins), blocks)
    return np.concatenate([*halves, low, middle, high, *fifth, nibbles.reshape(blocks, 128)], axis=1)


def _q6_k(rows: QuantizedRows) -> Bytes:
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


_FIVE = 5
_BLOCKS: dict[Type, tuple[RowsCodec, Callable[[QuantizedRows], Bytes]]] = {
    Type.Q2_K: (replace(CODECS["q4_k"], name="q2_k", bits=2, group=16), _q2_k),
    Type.Q3_K: (replace(CODECS["q6_k"], name="q3_k", bits=3), _q3_k),
    Type.Q4_K: (CODECS["q4_k"], _q4_k),
    Type.Q5_K: (replace(CODECS["q4_k"], name="q5_k", bits=_FIVE), _q4_k),
    Type.Q6_K: (CODECS["q6_k"], _q6_k),
}
