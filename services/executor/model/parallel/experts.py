"""How mixtures of experts are split over the ranks. Every rank holds a span of the inner width of each expert.

transformers keeps the experts of a layer as two parameters of three dimensions, whose layout the module itself names:

    gate_up_proj   [experts, 2 * inner, hidden]     is_transposed: [experts, hidden, 2 * inner]
                    [gate | up] along it            not is_concatenated: gate and up values take turns
    down_proj      [experts, hidden, inner]         is_transposed: [experts, inner, hidden]

The router is whole on every rank, so all ranks choose the same experts. What they compute is summed once; an expert
that hands on what it is given (LongCat's) does so on rank 0 alone.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.parallel.layers import TensorSlice, expert_product, halves, hold, leave_out, shifted
from shared.errors import ModelLoadError

_PARAMETERS = frozenset({"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"})
_IDENTITY = "identity_expert"
_BY_ROWS = frozenset({"mlp.w1", "mlp.v1", "mlp.w2"})

# torch's grouped product takes rows of a multiple of 16 bytes; narrower experts are multiplied one by one.
_GROUPED_MULTIPLE = 8


def split_experts(experts: Any, name: str, layout: ShardLayout, collectives: Collectives) -> None:
    """Makes the module `experts` (called `name`) hold this rank's span, in place.

    Raises `ModelLoadError` when it holds its experts in a way that is not known.
    """
    held = {leaf for leaf, _ in experts.named_parameters()}
    if held == _BY_ROWS:
        _split_rows(experts, layout, collectives)
        return
    named = hasattr(experts, "is_transposed") or hasattr(experts, _IDENTITY)
    if "down_proj" not in held or not held <= _PARAMETERS or not named:
        raise ModelLoadError(
            f"The experts {name} hold {', '.join(sorted(held)) or 'nothing'}, a form that is not served; "
            "choose a model of another architecture."
        )
    transposed = bool(getattr(experts, "is_transposed", False))
    inner_dim = 1 if transposed else 2
    inner = experts.down_proj.shape[inner_dim]
    span = layout.dimension(inner)
    if span.size % _GROUPED_MULTIPLE and hasattr(experts, "config"):
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation = "eager"  # noqa: SLF001  # no public name
    if layout.world_size == 1:
        return
    _hold_inputs(experts, span, inner, transposed)
    hold(experts, "down_proj", experts.down_proj, TensorSlice(inner_dim, (span,), inner))
    if "down_proj_bias" in held and layout.rank > 0:
        _drop_bias(experts)
    if hasattr(experts, _IDENTITY) and layout.rank > 0:
        setattr(experts, _IDENTITY, _Nothing())
    experts.register_forward_hook(_sum_over_ranks(collectives))


# Of an expert, rows and what they are, adds to what is made of them.
AddOfExpert = Callable[[int, Tensor, Tensor, Tensor], None]


def expert_leaves(experts: Any) -> tuple[str, str]:
    """What leads into `experts` and out of them."""
    return "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj", "down_proj"


def expert_by_expert(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    entry: AddOfExpert | None = None,
    out: AddOfExpert | None = None,
) -> Tensor:
    """What transformers' own forward of `experts` computes, by its names: `hidden_states` [T, width], the others
    [T, K]. `entry` and `out` add to what leads into the experts and out of them."""
    into, back = expert_leaves(experts)
    total = torch.zeros_like(hidden_states)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        if expert >= experts.num_experts:
            continue  # of another rank or of none
        rows, place = (top_k_index == expert).nonzero(as_tuple=True)
        x = hidden_states[rows]
        made = expert_product(experts, into, expert, x)
        if entry is not None:
            entry(expert, rows, x, made)
        inner = experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)  # noqa: SLF001
        made = expert_product(experts, back, expert, inner)
        if out is not None:
            out(expert, rows, inner, made)
        total.index_add_(0, rows, (made * top_k_weights[rows, place, None]).to(total.dtype))
    return total


def _split_rows(experts: Any, layout: ShardLayout, collectives: Collectives) -> None:
    """DBRX's: gate, up and down projection are [experts * inner, hidden] each, expert by expert."""
    if layout.world_size == 1:
        return
    inner: int = experts.ffn_hidden_size
    span = layout.dimension(inner)
    spans = tuple(shifted(span, inner * expert) for expert in range(experts.num_experts))
    for leaf, parameter in list(experts.mlp.named_parameters()):
        hold(experts.mlp, leaf, parameter, TensorSlice(0, spans, inner * experts.num_experts))
    experts.ffn_hidden_size = span.size
    experts.register_forward_hook(_sum_over_ranks(collectives))


def _hold_inputs(experts: Any, span: ShardRange, inner: int, transposed: bool) -> None:
    """The share of the projections into the experts: gate and up, or up alone."""
    gated = hasattr(experts, "gate_up_proj")
    leaf, full = ("gate_up_proj", 2 * inner) if gated else ("up_proj", inner)
    if not gated:
        spans: tuple[ShardRange, ...] = (span,)
    elif getattr(experts, "is_concatenated", True):
        spans = halves(span, inner)
    else:
        spans = (span.scaled(2),)
    hold(experts, leaf, getattr(experts, leaf), TensorSlice(2 if transposed else 1, spans, full))
    bias = f"{leaf}_bias"
    if hasattr(experts, bias):
        hold(experts, bias, getattr(experts, bias), TensorSlice(1, spans, full))


class _Nothing(nn.Module):
    """Zeros in place of what another rank hands on."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def _drop_bias(experts: Any, name: str = "down_proj_bias") -> None:
    """Zeros in place of the outputs' bias, which rank 0 alone adds: on every rank it would count once for each."""
    bias: Tensor = getattr(experts, name)
    delattr(experts, name)
    experts.register_buffer(name, torch.zeros(bias.shape, dtype=bias.dtype), persistent=False)
    leave_out(experts, name)


def split_stacks(experts: Any, layout: ShardLayout, collectives: Collectives) -> None:
    """JetMoe's: two stacks of matrices [experts, out, in], and a bias of what the second one's outputs add up to. They
    are a feed-forward, or make the queries of all KV heads and multiply what those attend."""
    if layout.world_size == 1:
        return
    first, last = experts.input_linear, experts.output_linear
    (_, rows, _), width = first.weight.shape, last.weight.shape[2]
    attends = hasattr(experts, "reduce")
    span = layout.kv_heads.scaled(layout.head_dim) if attends else layout.dimension(width)
    hold(first, "weight", first.weight, TensorSlice(1, (span,) if attends else halves(span, width), rows))
    hold(last, "weight", last.weight, TensorSlice(2, (span,), width))
    hidden = experts.bias.shape[0]
    if layout.rank > 0:
        _drop_bias(experts, "bias")
    else:
        hold(experts, "bias", experts.bias, TensorSlice(0, (ShardRange(0, hidden),), hidden))
    if not attends:
        experts.register_forward_hook(_sum_over_ranks(collectives))
        return
    reduce = experts.reduce
    experts.hidden_size = span.size
    experts.reduce = lambda attended, chosen: collectives.all_reduce(reduce(attended, chosen).contiguous())


def _sum_over_ranks(collectives: Collectives):  # type: ignore[no-untyped-def]
    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return collectives.all_reduce(output.contiguous())

    return hook
