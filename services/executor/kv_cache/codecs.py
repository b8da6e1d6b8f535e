"""How keys and values are compressed: eight bits per value and one scale per block and head.

    code = round(value / scale)     scale = largest absolute value / largest code     value ≈ code * scale

`int8` spreads its steps evenly: the error is at most half a step, 1/254 of the row's largest value.
`fp8` (e4m3) keeps three bits of mantissa: the error is at most 1/16 of the value itself, and for values
below 2^-6 of a scale at most 2^-10 of the scale.
Source of the format: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.

Below, a row is what shares a scale: the values of one head in one block, keys or values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.data_types import BlockDType, KvCodec

# So that a row of zeros is no division by zero, and no scale is a denormal number, which some kernels take for 0.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Codec:
    """The one declaration of a codec: bytes, scales and arithmetic follow from it."""

    name: KvCodec
    # By which kernels know it: `native/codec.h`, and CODE in `gpu/kernels/codes.py`; none has 0 there, 3 here.
    number: int
    dtype: torch.dtype  # of the codes
    limit: float  # the largest code

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(codes [..., n] of `dtype`, scales float32 [...]) of `rows` [..., n] of any floating dtype.

        A row that holds NaN or infinity gets a scale that is no finite number, hence decodes to NaN or
        infinity: nothing is hidden.
        """
        scaled = rows.to(torch.float32, copy=True)
        # On a CPU two reductions take a twentieth of the time of torch.aminmax.
        extreme = torch.maximum(scaled.amax(dim=-1), scaled.amin(dim=-1).neg_())
        scales = extreme.div_(self.limit).clamp_min_(SMALLEST_SCALE)
        scaled.div_(scales.unsqueeze(-1))
        if not self.dtype.is_floating_point:
            scaled.round_()
        # The quotient of the largest value may come out a little above the limit.
        return scaled.clamp_(-self.limit, self.limit).to(self.dtype), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows float32 [..., n] of `codes` [..., n] and `scales` [...]."""
        if self.dtype.is_floating_point:
            return e4m3_to_float(codes).mul_(scales.unsqueeze(-1))
        return codes.to(torch.float32).mul_(scales.unsqueeze(-1))


INT8 = Codec("int8", 1, torch.int8, 127.0)
FP8 = Codec("fp8", 2, torch.float8_e4m3fn, 448.0)
# What `--kv-dtype auto` takes: fp8 is read as fast and takes as many bytes, but is coarser (ADR 0009).
PREFERRED = INT8
AS_COMPUTED: BlockDType = "bf16"
COMPRESSING = (INT8, FP8)
# None: blocks stay as they are.
CODECS: dict[BlockDType, Codec | None] = {AS_COMPUTED: None, **{codec.name: codec for codec in COMPRESSING}}


def codecs_of(dtypes: Sequence[BlockDType]) -> tuple[Codec | None, ...]:
    """The codec of each layer; None where blocks stay as they are."""
    return tuple(CODECS[dtype] for dtype in dtypes)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """`codes` (float8_e4m3fn, finite) as float32: what `codes.float()` gives, at eight times its speed on a CPU.

        e4m3     s eeee mmm                 value = ±2^(e - 7) * 1.mmm
        float16  s 0eeee mmm0000000         value = ±2^(e - 15) * 1.mmm, for denormals alike

    Shifted by seven bits, an e4m3 number is a float16 that is 2^-8 of it.
    """
    wide = codes.view(torch.int8).to(torch.int16)
    # A sign that was extended has filled the highest bit of float16's exponent as well.
    halves = wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return halves.to(torch.float32).mul_(256.0)
