"""The formats that `--weight-dtype` quantizes weights to while they are loaded, each once.

    int8    one scale per row                                              8 bits a weight
    fp8     the same, codes of e4m3                                        8
    q8_0    one float16 scale per 32 inputs                                8.5
    q6_k    one 8-bit scale per 16 inputs, one float16 per 256             6.56
    q4_k    one 6-bit scale and minimum per 32 inputs, two float16 per 256 4.5
    int4    one float16 scale and a zero point per 64 inputs               4.375

The `q` formats are GGUF's: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h. Where a row is no multiple of 256
inputs, fewer of them share the float16. Names for settings and help are `WeightFormat` in `shared/data_types.py`.
"""

from dataclasses import dataclass
from enum import IntEnum


class Scaling(IntEnum):
    """What the codes of a row are multiplied with, numbered as in `native/quantized.h`."""

    SYMMETRIC = 0
    SIGNED = 1  # scales of two levels
    WITH_MINIMUMS = 2  # scales of two levels, and minimums
    WITH_ZEROS = 3
    E4M3 = 4


@dataclass(frozen=True)
class WeightFormat:
    """One way to quantize rows."""

    name: str
    bits: int
    group: int  # inputs that share a scale; 0: the row
    kind: Scaling
    vocabulary: str  # the format that embedding and head get: their errors no later layer evens out
    stored_bits: float  # of a weight, scales included
    # GPUs multiply by it as the codec of KV blocks of that name keeps it; else by rows of codes as CPUs do.
    kv_codec: bool = False
    gpu_from: tuple[int, int] = (0, 0)  # compute capability of the first GPUs that multiply such codes


WEIGHT_FORMATS = {
    one.name: one
    for one in (
        WeightFormat("int8", 8, 0, Scaling.SYMMETRIC, "int8", 8.0, kv_codec=True),
        WeightFormat("fp8", 8, 0, Scaling.E4M3, "q8_0", 8.0, kv_codec=True, gpu_from=(8, 9)),
        WeightFormat("q8_0", 8, 32, Scaling.SYMMETRIC, "q8_0", 8.5),
        WeightFormat("q6_k", 6, 16, Scaling.SIGNED, "q6_k", 6.6),
        WeightFormat("q4_k", 4, 32, Scaling.WITH_MINIMUMS, "q6_k", 4.5),
        WeightFormat("int4", 4, 64, Scaling.WITH_ZEROS, "q6_k", 4.4),
    )
}
