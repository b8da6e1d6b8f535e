"""Which of GGUF's types each tensor gets, and its rows as bytes of that type.

github.com/ggml-org/llama.cpp: ggml/src/ggml-common.h has the blocks, src/llama-quant.cpp the mixtures
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class GgufDtype:
    """What `--dtype` means for a GGUF file."""

    name: str
    matrices: Type
    vocabulary: Type
    """Of embedding and head."""
    file_type: int
    mixed: bool = False
    """Some of the values' and the second feed-forward's weights are of the vocabulary's type too."""


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
        GgufDtype("q4_k_m", Type.Q4_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q4_K_M, mixed=True),
        GgufDtype("q4_k_s", Type.Q4_K, Type.Q6_K, _FILE_TYPES.MOSTLY_Q4_K_S),
        GgufDtype("q4_1", Type.Q4_1, Type.Q8_0, _FILE_TYPES.MOSTLY_Q4_1),
        GgufDtype("q4_0", Type.Q4_0, Type.Q8_0, _FILE_TYPES.MOSTLY_Q4_0),
    )
}

_COARSER = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
"""What rows get that are no multiple of 256 values, as in llama.cpp."""
_MIXED = re.compile(r"blk\.(\d{1,6})\.(attn_v|ffn_down)\.")


def type_of(name: str, shape: tuple[int, ...], dtype: GgufDtype, layers: int) -> Type:
    """The type of the tensor `name` (GGUF's) of `shape`; vectors stay float32."""
    if len(shape) < 2:
        return Type.F32
    wanted = dtype.matrices
    if name in ("token_embd.weight", "output.weight"):
        wanted = dtype.vocabulary
    elif dtype.mixed and (found := _MIXED.match(name)):
        wanted = dtype.vocabulary if _gets_more_bits(int(found[1]), layers) else wanted
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
        room = CODECS[codec].empty(*weight.shape)
        CODECS[codec].encode_into(room, weight)
        return pack(room)
    if kind is Type.BF16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind is Type.F16:
        return rows.to(torch.float16).contiguous().numpy()
    values: NDArray[np.generic] = gguf.quantize(rows.float().contiguous().numpy(), kind)
    return values


def _q4_k(rows: QuantizedRows) -> Bytes:
    """128 + 16 bytes for 256 values: two float16, 8 scales and 8 minimums of 6 bits, nibbles."""
    assert rows.supers is not None
    assert rows.super_mins is not None
    assert rows.mins is not None
    blocks = rows.codes.numel() // 256
    scales, mins = rows.scales.numpy().reshape(blocks, 8), rows.mins.numpy().reshape(blocks, 8)
    low = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    middle = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    high = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    codes = rows.codes.numpy().reshape(blocks, 4, 2, 32)
    nibbles = codes[:, :, 0] | (codes[:, :, 1] << 4)
    halves = [_float16(part, blocks) for part in (rows.supers, rows.super_mins)]
    return np.concatenate([*halves, low, middle, high, nibbles.reshape(blocks, 128)], axis=1)


def _q6_k(rows: QuantizedRows) -> Bytes:
    """128 + 64 + 16 + 2 bytes for 256 values: nibbles, upper two bits, signed scales, float16."""
    assert rows.supers is not None
    blocks = rows.codes.numel() // 256
    codes = rows.codes.numpy().reshape(blocks, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | ((codes[:, :, 2:] & 15) << 4)
    upper = codes >> 4
    high = upper[:, :, 0] | (upper[:, :, 1] << 2) | (upper[:, :, 2] << 4) | (upper[:, :, 3] << 6)
    scales = rows.scales.numpy().view(np.uint8).reshape(blocks, 16)
    parts = [low.reshape(blocks, 128), high.reshape(blocks, 64), scales, _float16(rows.supers, blocks)]
    return np.concatenate(parts, axis=1)


def _float16(values: Tensor, blocks: int) -> Bytes:
    return values.contiguous().numpy().view(np.uint8).reshape(blocks, 2)


_BLOCKS: dict[Type, tuple[str, Callable[[QuantizedRows], Bytes]]] = {
    Type.Q4_K: ("q4_k", _q4_k),
    Type.Q6_K: ("q6_k", _q6_k),
}
