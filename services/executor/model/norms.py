"""Norms of queries and keys that span several heads, of which a rank holds its own.

wide norm     over all heads' values at once: the ranks add up the squares of theirs
head norms    within each head, with weights of its own: a rank keeps those of its heads
"""

import torch
from torch import Tensor, nn

from services.executor.model.collectives import Collectives
from services.executor.model.layers import ShardedLayer, TensorSlice, hold, leave_out
from services.executor.model.sharding import Span
from shared.errors import ModelLoadError


class WideNorm(ShardedLayer):
    """A rank's share of an RMS norm over the values of all heads. [..., share] -> [..., share].

    A head that several ranks hold counts once: of the rank's `span` the squares of `counted`, a part of it, are
    added. One small all-reduce a call. Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """

    weight: nn.Parameter

    def __init__(self, norm: nn.Module, span: Span, counted: Span, collectives: Collectives):
        super().__init__()
        weight: Tensor = norm.weight  # type: ignore[assignment]
        self._epsilon: float = norm.variance_epsilon  # type: ignore[assignment]
        self._width = weight.shape[0]
        self._counted = slice(counted.start - span.start, counted.stop - span.start)
        self._collectives = collectives
        hold(self, "weight", weight, TensorSlice(0, (span,), self._width))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        squares = values[..., self._counted].pow(2).sum(-1, keepdim=True)
        mean = self._collectives.all_reduce(squares) / self._width
        return (values * torch.rsqrt(mean + self._epsilon) * self.weight).to(x.dtype)


class _LocalNorms(nn.Module):
    """The norms of this rank's heads, under the names that the checkpoint gives them."""

    def __init__(self, norms: nn.ModuleList, heads: Span):
        super().__init__()
        for index, norm in enumerate(norms):
            if heads.start <= index < heads.stop:
                self.add_module(str(index), norm)
            else:
                for name, _ in norm.named_parameters():
                    leave_out(self, f"{index}.{name}")

    def __iter__(self):  # type: ignore[no-untyped-def]  # what transformers' code walks through
        return iter(self.children())


def keep_head_norms(norm: nn.Module, name: str, heads: Span, total: int) -> None:
    """Makes `norm` (module `name`), which has weights for each of `total` heads, hold those of `heads` alone.

    Raises `ModelLoadError` when it is built in a way that is not known.
    """
    norms = getattr(norm, "norms", None)
    if isinstance(norms, nn.ModuleList) and len(norms) == total:
        norm.norms = _LocalNorms(norms, heads)
        return
    parameters = list(norm.named_parameters())
    for leaf, parameter in parameters:
        if "." in leaf or parameter.dim() != 2 or parameter.shape[0] != total:
            raise ModelLoadError(
                f"The norm {name} holds {leaf} of shape {list(parameter.shape)}, which is not one row for each of "
                f"{total} heads, and is not served; choose a model of another architecture."
            )
        hold(norm, leaf, parameter, TensorSlice(0, (heads,), total))
