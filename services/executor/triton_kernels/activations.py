"""The activation of a gated feed-forward: act(gate) * up, in float32, rounded once.

Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.
"""

import triton
import triton.language as tl


@triton.jit
def gated(x, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Grid (rows, width / BLOCK, rounded up): `x` [rows, 2 * width], gate and up, to `out` [rows, width], contiguous.

    SiLU, or with GELU the approximation of GELU by tanh: of y = sqrt(2 / pi) * (g + 0.044715 g^3), 0.5 * (1 + tanh y)
    is the logistic function of 2 y.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * (2 * width) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * width) + width + at, mask=inside, other=0.0).to(tl.float32)
    power = gate
    if GELU:
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    acted = gate / (1.0 + tl.exp(tl.minimum(-power, 80.0)))  # beyond, exp would overflow, and nothing is left
    tl.store(out + row * width + at, (acted * up).to(out.dtype.element_ty), mask=inside)
