"""Products with quantised weights, by how many rows `x` has.

                rows          e4m3                                     int8
    few         to 32, 128    weights widened in registers, activations in bf16 (`kernels/matmul.py`)
    many        more          activations to e4m3, a scale for each    weights widened into a scratch, a part at
                              row, torch._scaled_mm                    a time, torch.addmm in bf16

Few rows take as long as the weights take to be read: one byte each, not two. On an H200 (4.8 TB/s; 790 and 1580 dense
TFLOP/s of bf16 and fp8, which a kernel of Triton's may reach half of) a weight is read in 0.21 ps and multiplied by one
row in 2.5 fs of bf16 tensor cores, 5 fs of Triton's: up to some 40 rows the reading is longer.

    e4m3   `_scaled_mm` reads as few bytes and is fast at any size, but rounds activations, which costs quality, and
           needs a launch for it, some 2 us: it takes over where multiplying begins to take longer than reading.
    int8   Activations in 255 even steps lose the small values of a row to its largest, and models of billions of
           weights have rows whose largest is a hundred times the rest (Dettmers et al., "LLM.int8()",
           https://arxiv.org/abs/2208.07339). So `torch._int_mm` is not used: weights are widened, which takes
           3 bytes a weight, 0.63 ps, whatever the rows: half of the product at 512, an eighth at 2048.

`_scaled_mm` scaled by rows takes a row-major [T, in] and a column-major [in, out], both sizes of the weight multiples
of 16, scales float32 [T, 1] and [1, out], and gives bf16; weights of other sizes are widened instead. Its fast sums
keep some 14 bits (DeepSeek-AI, "DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 3.3.2), little beside the
three bits of e4m3's mantissa.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from services.executor.gpu.attention import processors_of
from services.executor.gpu.kernels.matmul import (
    MOST_ROWS,
    arrivals_for,
    decode_rows,
    encode_rows,
    multiply_alike,
    multiply_few,
)
from services.executor.kv_cache.codecs import FP8
from services.executor.model.quantized import DeferredRows
from services.executor.model.weight_formats import Quantized, Weight

FEW = {torch.float8_e4m3fn: 32, torch.int8: MOST_ROWS}
"""Rows up to which weights are widened in registers."""
MULTIPLE = 16
"""Of the sizes that `_scaled_mm` takes."""
SCRATCH = 64 << 20
"""Bytes of widened weights."""

Scaled = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(codes [T, in], scales [T], weight codes [out, in], weight scales [out], bias) -> bf16 [T, out]"""


def scaled_by_rows(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """`Scaled` by the library, on a GPU."""
    return torch._scaled_mm(  # noqa: SLF001  # no public name before torch 2.10, whose `scaled_mm` is beta
        codes,
        weight.t(),
        scale_a=scales.unsqueeze(1),
        scale_b=weight_scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class CodedProduct:
    """With a quantised weight."""

    def __init__(self, weight: Quantized, bias: Tensor | None, scaled: Scaled | None) -> None:
        """`scaled`: what multiplies many rows; None: they are multiplied by widened weights."""
        self._weight, self._bias, self._scaled = weight, bias, scaled
        outputs, device = len(weight.codes), weight.codes.device
        self._few = FEW[weight.codes.dtype] if scaled is not None else MOST_ROWS
        self._arrivals = arrivals_for(outputs, device)
        self._processors = processors_of(device)

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self._weight
        if len(x) <= self._few:
            return multiply_few(x, codes, scales, self._bias, self._arrivals, self._processors)
        if self._scaled is not None:
            return self._scaled(*encode_rows(x, FP8), codes, scales, self._bias)
        return multiply_widened(x, self._weight, self._bias)


class InvariantProduct:
    """With any weight, in tiles and splits that depend on its shape alone."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        assert not isinstance(weight, DeferredRows), "codes are read later for CPUs alone"
        self._codes = weight if isinstance(weight, Tensor) else weight.codes
        self._scales = None if isinstance(weight, Tensor) else weight.scales
        self._bias = bias
        self._arrivals = arrivals_for(len(self._codes), self._codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_alike(x, self._codes, self._scales, self._bias, self._arrivals)


def coded_product(
    weight: Quantized, bias: Tensor | None, scaled: Scaled | None = scaled_by_rows
) -> CodedProduct:
    """By the kind and the sizes of `weight`."""
    fits = weight.codes.dtype == FP8.dtype and not any(size % MULTIPLE for size in weight.codes.shape)
    return CodedProduct(weight, bias, scaled if fits else None)


def multiply_widened(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """`x` [T, in] times weights in its dtype, of which there are some `SCRATCH` bytes at a time."""
    outputs, inputs = weight.codes.shape
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    step = min(outputs, max(1, SCRATCH // (inputs * x.element_size())))
    scratch = torch.empty((step, inputs), dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        part = weight.rows(first, first + step)
        wide = scratch[: len(part.codes)]
        decode_rows(part.codes, part.scales, wide)
        into = out[:, first : first + step]
        if bias is None:
            torch.mm(x, wide.t(), out=into)
        else:
            torch.addmm(bias[first : first + step], x, wide.t(), out=into)
    return out
