"""Data types that settings, the registry and the command line know by name.

Each list stands here alone; checks, help and documentation are made of it.

A codec of KV blocks is declared in `services/executor/kv_cache/codecs.py`, a weight format in
`services/executor/model/quantizing.py`.
"""

from typing import Literal, get_args

DType = Literal["auto", "bf16", "fp32"]
DTYPES: tuple[str, ...] = get_args(DType)

KvCodec = Literal["fp8", "int8"]
BlockDType = Literal["bf16", KvCodec]
"""Of a full KV block; `bf16` means uncompressed: keys and values stay as the model computes them."""
KvDType = Literal["auto", BlockDType]
BLOCK_DTYPES: tuple[BlockDType, ...] = get_args(BlockDType)
KV_DTYPES: tuple[str, ...] = get_args(KvDType)

WeightFormat = Literal["fp8", "int8", "q8_0", "q6_k", "q4_k", "int4"]
WeightDType = Literal["auto", "bf16", WeightFormat]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDType)
WEIGHT_BITS: dict[str, float] = {"int8": 8.0, "fp8": 8.0, "q8_0": 8.5, "q6_k": 6.6, "q4_k": 4.5, "int4": 4.4}
"""Of a weight in each format, scales included."""
