"""A rank's share of projections that compute several things at once, and of mixtures of experts.

Pure arithmetic over `ShardLayout`, in rows of the weight (outputs of the projection), head size d:

    blocks      [q0 q1 q2 q3 | k0 k1 | v0 v1]             rank 0 of 2: q0-q1, k0, v0
    by group    [q0 q1 k0 v0 | q2 q3 k1 v1]               rank 0 of 2: the first group
    halves      [gate | up]                               the same span of each

Of a mixture of experts every rank holds a span of the inner width of each expert. transformers keeps the experts of a
layer as two parameters of three dimensions. Their layout is named by the module itself:

    gate_up_proj   [experts, 2 * inner, hidden]     is_transposed: [experts, hidden, 2 * inner]
                    [gate | up] along it            not is_concatenated: gate and up values take turns
    down_proj      [experts, hidden, inner]         is_transposed: [experts, inner, hidden]

The router is whole on every rank, so all ranks choose the same experts. What they compute is summed once.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout, Span
from services.executor.model.parallel.layers import TensorSlice, hold, leave_out
from shared.errors import ModelLoadError


def halves(span: Span, width: int) -> tuple[Span, ...]:
    """`span` of each of two projections of `width` that stand one after the other."""
    return merged([span, shifted(span, width)])


def blocks(layout: ShardLayout) -> tuple[Span, ...]:
    """This rank's rows of [all q | all k | all v]."""
    size, total = layout.head_dim, layout.total
    keys = layout.kv_heads.scaled(size)
    first_key = total.q_heads * size
    first_value = first_key + total.kv_heads * size
    return merged(
        [layout.q_heads.scaled(size), shifted(keys, first_key), shifted(keys, first_value)],
    )


def by_group(layout: ShardLayout) -> tuple[Span, ...]:
    """This rank's rows of [queries of KV head 0, its key, its value | the same of KV head 1 | ...]."""
    size = layout.head_dim
    group = layout.total.q_heads // layout.total.kv_heads
    spans = []
    for index in range(layout.kv_heads.size):
        head = layout.kv_heads.start + index
        first = layout.q_heads.start + index * layout.q_per_kv - head * group
        start = head * (group + 2)
        spans.append(Span(start + first, start + first + layout.q_per_kv).scaled(size))
        spans.append(Span(start + group, start + group + 2).scaled(size))
    return merged(spans)


def shifted(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """The same rows with neighbours joined, so that they are read at once."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


_PARAMETERS = frozenset(
    {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}
)

_GROUPED_MULTIPLE = 8
"""torch's grouped product takes rows of a multiple of 16 bytes; narrower experts are multiplied one by one."""


def split_experts(experts: Any, name: str, layout: ShardLayout, collectives: Collectives) -> None:
    """Makes the module `experts` (called `name`) hold this rank's span, in place.

    Raises `ModelLoadError` when it holds its experts in a way that is not known.
    """
    held = {leaf for leaf, _ in experts.named_parameters()}
    if "down_proj" not in held or not held <= _PARAMETERS or not hasattr(experts, "is_transposed"):
        raise ModelLoadError(
            f"The experts {name} hold {', '.join(sorted(held)) or 'nothing'}, a form that is not served; "
            "choose a model of another architecture."
        )
    transposed = bool(experts.is_transposed)
    inner_dim = 1 if transposed else 2
    inner = experts.down_proj.shape[inner_dim]
    span = layout.dimension(inner)
    if span.size % _GROUPED_MULTIPLE:
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation = "eager"  # noqa: SLF001  # no public name
    if layout.world_size == 1:
        return
    _hold_inputs(experts, span, inner, transposed)
    hold(experts, "down_proj", experts.down_proj, TensorSlice(inner_dim, (span,), inner))
    if "down_proj_bias" in held and layout.rank > 0:
        _drop_bias(experts)
    experts.register_forward_hook(_sum_over_ranks(collectives))


def _hold_inputs(experts: Any, span: Span, inner: int, transposed: bool) -> None:
    """The share of the projections into the experts: gate and up, or up alone."""
    gated = hasattr(experts, "gate_up_proj")
    leaf, full = ("gate_up_proj", 2 * inner) if gated else ("up_proj", inner)
    if not gated:
        spans: tuple[Span, ...] = (span,)
    elif experts.is_concatenated:
        spans = halves(span, inner)
    else:
        spans = (span.scaled(2),)
    hold(experts, leaf, getattr(experts, leaf), TensorSlice(2 if transposed else 1, spans, full))
    bias = f"{leaf}_bias"
    if hasattr(experts, bias):
        hold(experts, bias, getattr(experts, bias), TensorSlice(1, spans, full))


def _drop_bias(experts: Any) -> None:
    """Zeros in place of the outputs' bias, which rank 0 alone adds: on every rank it would count once for each."""
    bias: Tensor = experts.down_proj_bias
    del experts.down_proj_bias
    experts.register_buffer("down_proj_bias", torch.zeros(bias.shape, dtype=bias.dtype), persistent=False)
    leave_out(experts, "down_proj_bias")


def _sum_over_ranks(collectives: Collectives):  # type: ignore[no-untyped-def]
    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return collectives.all_reduce(output.contiguous())

    return hook
