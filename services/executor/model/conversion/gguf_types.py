"""Which of GGUF's types each tensor gets, and its rows as bytes of that type.

github.com/ggml-org/llama.cpp: ggml/src/ggml-common.h has the blocks, src/llama-quant.cpp the mixtures
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.loading.gguf_blocks import BLOCKS


@dataclass(frozen=True)
class GgufDtype:
    """What `--dtype` means for a GGUF file."""

    name: str
    matrices: Type
    vocabulary: Type  # of embedding and head
    file_type: int
    # Weights of layers that get other types: in the layers where more bits count, and in the others
    mixed: Mapping[str, tuple[Type, Type]] = field(default_factory=dict)


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

# What rows get that are no multiple of 256 values, as in llama.cpp (which has IQ4_NL for Q4_0).
_COARSER = {
    Type.Q2_K: Type.Q4_0,
    Type.Q3_K: Type.Q4_0,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}
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
    block = BLOCKS.get(kind)
    if block is not None and block.pack is not None and block.codec is not None:
        weight = rows.reshape(-1, rows.shape[-1])
        room = block.codec.empty(*weight.shape)
        block.codec.encode_into(room, weight)
        return block.pack(room)
    if kind is Type.BF16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind is Type.F16:
        return rows.to(torch.float16).contiguous().numpy()
    values: NDArray[np.generic] = gguf.quantize(rows.float().contiguous().numpy(), kind)
    return values
