"""Data types that settings, the registry and the command line know by name.

Each list stands here alone; checks, help and documentation are made of it.

A codec of KV blocks is declared in `services/executor/kv_cache/codecs.py`, a weight format in
`services/executor/core/weight_formats.py`.
"""

from typing import Literal, get_args

DType = Literal["auto", "bf16", "fp32"]
DTYPES: tuple[str, ...] = get_args(DType)

KvCodec = Literal["fp8", "int8"]
# Of a full KV block; `bf16` means uncompressed: keys and values stay as the model computes them.
BlockDType = Literal["bf16", KvCodec]
KvDType = Literal["auto", BlockDType]
BLOCK_DTYPES: tuple[BlockDType, ...] = get_args(BlockDType)
KV_DTYPES: tuple[str, ...] = get_args(KvDType)

WeightFormat = Literal["fp8", "int8", "q8_0", "q6_k", "q4_k", "int4"]
WeightDType = Literal["auto", "bf16", WeightFormat]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDType)
