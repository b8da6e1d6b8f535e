"""A linear layer that is frozen, with low-rank factors beside it that are trained.

    y = x W' + bias + scale * drop(x) A' B'          W: unpacked for this product, and for the one backward

    dx = dy W + drop'(dh A)      dh = scale * dy B      dA = dh' drop(x)      dB = scale * dy' (drop(x) A')

Where a rank has a share of the outputs, it takes those rows of B, and of the inputs those columns of A. The factors'
gradients are then those of its share, and zero elsewhere.

Of the weight nothing is kept from forward to backward, of the factors' side x and x A', which has the rank's width.
Dropout is drawn again where it is needed, from what it was drawn from. What the factors add is computed first: where a
layer is recomputed for its gradients, it ends before its last product.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685, section 4.1.
"""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.executor.model.adapters.targets import AdapterTarget, Spans
from services.executor.training.base.weights import FrozenWeight, Scratch
from services.executor.training.batch import DropoutKey


@dataclass(frozen=True)
class Factors:
    """What is trained of one linear: it adds scale * B A x."""

    a: nn.Parameter  # float32 [rank, inputs]
    b: nn.Parameter  # float32 [outputs, rank]

    @classmethod
    def drawn(cls, seed: int, name: str, rank: int, shape: tuple[int, int], device: torch.device) -> "Factors":
        """For a linear of `shape` [outputs, inputs]: A from (seed, name), as peft draws it, and B zero."""
        outputs, inputs = shape
        a = torch.empty(rank, inputs)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator_of(torch.device("cpu"), seed, name))
        return cls(nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(outputs, rank, device=device)))


def generator_of(device: torch.device, *key: object) -> torch.Generator:
    """One whose numbers follow from `key` alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass
class Pass:
    """What the linears of a model must know of the pass that is under way."""

    adapter: bool = True  # whether the factors count
    dropout: DropoutKey | None = None
    lengths: list[int] = field(default_factory=list)  # of the examples of its batch


class FrozenLinear:
    """[T, inputs] -> [T, outputs]"""

    def __init__(
        self, name: str, weight: FrozenWeight, bias: Tensor | None, scratch: Scratch, current: list[Pass]
    ) -> None:
        """`bias`: of the type of `scratch`. `current`: one entry, the pass that is under way."""
        self.name = name
        self.weight = weight
        self.scratch = scratch
        self.bias = bias
        self.factors: Factors | None = None
        self.scale = 0.0
        self.dropout = 0.0
        self._target: AdapterTarget | None = None
        self._current = current

    def train(self, target: AdapterTarget, factors: Factors, scale: float, dropout: float) -> None:
        """From now on `factors` count, in passes with the adapter. `target`: the linear whole, and this share of it."""
        self._target, self.factors, self.scale, self.dropout = target, factors, scale, dropout

    def __call__(self, x: Tensor) -> Tensor:
        now = self._current[0]
        added: Tensor | None = None
        if self.factors is not None and self._target is not None and now.adapter:
            target, drop = self._target, None
            if now.dropout and self.dropout:
                drop = Dropout(self.name, now.dropout, self.dropout, target.inputs, target.columns)
            a, b = _cut(self.factors.a, target.columns, 1), _cut(self.factors.b, target.rows, 0)
            added = _LowRank.apply(x, a, b, self.scale, drop)  # type: ignore[no-untyped-call]
        product: Tensor = _Product.apply(x, added, self)  # type: ignore[no-untyped-call]
        return product


def _cut(whole: Tensor, spans: Spans | None, dim: int) -> Tensor:
    """`spans` of a dimension, end to end; None: all."""
    if spans is None:
        return whole
    return torch.cat([whole.narrow(dim, first, end - first) for first, end in spans], dim)


@dataclass(frozen=True)
class Dropout:
    """Of the inputs of one linear's factors in one pass: drawn of all inputs, whoever has a share of them."""

    name: str
    key: DropoutKey
    share: float  # of the values that are dropped; the others grow so that their mean stays
    inputs: int
    columns: Spans | None = None

    def of(self, x: Tensor) -> Tensor:
        """`x` with values dropped; also the derivative, of what comes back to it."""
        generator = generator_of(x.device, self.key.seed, self.key.step, self.key.micro_step, self.name)
        drawn = torch.empty(len(x), self.inputs, dtype=torch.float32, device=x.device)
        kept = _cut(drawn.uniform_(generator=generator), self.columns, 1)
        return x * (kept >= self.share).to(x.dtype).mul_(1 / (1 - self.share))


class _Product(torch.autograd.Function):
    """x W' + bias, added to what the factors give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, linear: FrozenLinear) -> Tensor:
        ctx.linear = linear
        weight = linear.weight.rows(0, linear.weight.outputs, linear.scratch)
        product = functional.linear(x, weight, linear.bias)
        return product if added is None else product.add_(added)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = gradients
        linear: FrozenLinear = ctx.linear
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ linear.weight.rows(0, linear.weight.outputs, linear.scratch)
        return dx, dy if ctx.needs_input_grad[1] else None, None


class _LowRank(torch.autograd.Function):
    """scale * drop(x) A' B', computed in the type of x; gradients of the factors in theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, drop: Dropout | None) -> Tensor:
        inner = (x if drop is None else drop.of(x)) @ a.to(x.dtype).t()
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale, ctx.drop = scale, drop
        return inner @ (b * scale).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        (dy,) = gradients
        x, inner, a, b = ctx.saved_tensors
        drop: Dropout | None = ctx.drop
        d_inner = dy @ (b * ctx.scale).to(dy.dtype)
        db = (dy.t() @ inner).float().mul_(ctx.scale)
        da = (d_inner.t() @ (x if drop is None else drop.of(x))).float()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = d_inner @ a.to(dy.dtype)
            dx = dx if drop is None else drop.of(dx)
        return dx, da, db, None, None
