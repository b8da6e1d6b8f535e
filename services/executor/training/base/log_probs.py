"""Log probabilities of given tokens, without the logits of all others.

The output layer is computed for trained rows alone, a block of the vocabulary at a time, with running sums as flash
attention has them; its weight is unpacked once a pass. The gradient of a row's log probability is made on the way,

    d log p(target) / dx = c'(l_target) W_target - sum over v of p_v c'(l_v) W_v        l: logits, c: soft cap

so that nothing is computed again, and all that is kept for backward is one vector a row, which that multiplies. Where
each rank has a part of the vocabulary, they add up their sums; the vector is made of each rank's own tokens.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867;
Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.training.base.weights import FrozenWeight, Scratch

_BLOCK = 8192  # tokens of the vocabulary whose logits are computed at once
_TILE = 1 << 22  # logits that are held at once, float32


@dataclass(frozen=True)
class Head:
    """An output layer, and what a model does with its products."""

    weight: FrozenWeight
    bias: Tensor | None  # float32 [vocabulary]
    scale: float  # logits are multiplied by it,
    cap: float  # and then capped: cap * tanh(logit / cap). 0: not
    scratch: Scratch
    first: int = 0  # the token whose output is the first here: of the vocabulary each rank has a part
    collectives: Collectives = field(default_factory=SingleRank)

    def log_probs(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [N] log p(target), and bool [N] whether no token is likelier, of `states` [N, hidden] and int64 [N]
        `targets`. The gradient of `states` is this rank's part of it."""
        found: tuple[Tensor, Tensor] = _LogProbs.apply(states, targets, self)  # type: ignore[no-untyped-call]
        return found


class _Sums:
    """Of some rows, over the blocks of the vocabulary that have been seen."""

    def __init__(self, states: Tensor, targets: Tensor, with_gradient: bool) -> None:
        rows = len(states)
        self._states, self._targets = states, targets
        self._largest = torch.full((rows,), float("-inf"), device=states.device)
        self._sum = torch.zeros(rows, device=states.device)
        self._target = torch.zeros(rows, device=states.device)
        self._mean = torch.zeros(states.shape, device=states.device) if with_gradient else None
        self._own = torch.zeros(states.shape, device=states.device) if with_gradient else None

    def add(self, head: Head, weight: Tensor, first: int) -> None:
        """A block of the vocabulary: `weight` [B, hidden] of the tokens from `first` on."""
        logits = (self._states @ weight.t()).float()
        if head.bias is not None:
            logits += head.bias[first : first + len(weight)]
        if head.scale != 1.0:
            logits *= head.scale
        slopes = None
        if head.cap:
            slopes = torch.tanh_(logits.div_(head.cap))
            logits = slopes * head.cap
            slopes = slopes.square_().neg_().add_(1)
        here = ((self._targets >= first) & (self._targets < first + len(weight))).nonzero().flatten()
        at = self._targets[here] - first
        self._target[here] = logits[here, at]
        largest = torch.maximum(self._largest, logits.amax(dim=1))
        shrink = torch.exp(self._largest - largest)
        self._largest = largest
        shares = torch.exp_(logits.sub_(largest.unsqueeze(1)))
        self._sum.mul_(shrink).add_(shares.sum(dim=1))
        if self._mean is None or self._own is None:
            return
        own = weight[at].float()
        if slopes is not None:
            own *= slopes[here, at].unsqueeze(1)
            shares *= slopes
        self._own[here] = own
        self._mean.mul_(shrink.unsqueeze(1)).add_(shares.to(weight.dtype) @ weight)

    def meet(self, collectives: Collectives) -> None:
        """From now on largest logit, sum and the target's logit are those of all ranks' tokens."""
        all_largest = self._largest.new_zeros(collectives.world_size, len(self._largest))
        all_largest[collectives.rank] = self._largest
        largest = collectives.all_reduce(all_largest).amax(dim=0)
        shrink = torch.exp(self._largest - largest)
        sums = torch.stack([self._sum * shrink, self._target])
        self._largest, (self._sum, self._target) = largest, collectives.all_reduce(sums)
        if self._mean is not None:
            self._mean.mul_(shrink.unsqueeze(1))

    def finish(self, scale: float, log_probs: Tensor, likeliest: Tensor, direction: Tensor | None) -> None:
        log_probs.copy_(self._target - self._largest - self._sum.log())
        likeliest.copy_(self._target >= self._largest)
        if direction is not None and self._mean is not None and self._own is not None:
            direction.copy_((self._own - self._mean / self._sum.unsqueeze(1)).mul_(scale))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        rows, vocabulary = len(states), head.weight.outputs
        log_probs = torch.empty(rows, device=states.device)
        likeliest = torch.empty(rows, dtype=torch.bool, device=states.device)
        direction = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        step = max(1, _TILE // min(_BLOCK, vocabulary))
        parts = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
        here = targets - head.first
        sums = [_Sums(states[part], here[part], direction is not None) for part in parts]
        for first in range(0, vocabulary, _BLOCK):
            weight = head.weight.rows(first, min(first + _BLOCK, vocabulary), head.scratch)
            for some in sums:
                some.add(head, weight, first)
        for part, some in zip(parts, sums, strict=True):
            if head.collectives.world_size > 1:
                some.meet(head.collectives)
            some.finish(head.scale, log_probs[part], likeliest[part], None if direction is None else direction[part])
        ctx.save_for_backward(*([] if direction is None else [direction]))
        ctx.mark_non_differentiable(likeliest)
        return log_probs, likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (direction,) = ctx.saved_tensors
        return (direction.float() * gradients[0].unsqueeze(1)).to(direction.dtype), None, None
