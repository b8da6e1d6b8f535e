"""Mixtures of experts, lowered: which experts a row goes to, and their weights in one order, whatever a model's own
modules call them (`native/decoder.h`, rz_experts).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.families.family import Scores
from services.executor.model.parallel.layers import expert_weight_of, keep_quantized_experts
from services.executor.model.weight_formats import Weight


@dataclass(frozen=True)
class RouterConfig:
    """Which experts a row goes to, and how much each counts."""

    scores: Scores
    chosen: int  # experts of a row
    normalised: bool  # whether the weights of a row's experts add up to 1
    groups: int
    top_groups: int  # experts are chosen from the best so many of the groups
    scale: float  # of the weights
    group_scores: int = 2  # groups are chosen by the sum of so many of their best scores, 1 or 2


@dataclass(frozen=True)
class Routing:
    """A mixture of experts, before it is packed."""

    experts: nn.Module  # transformers' own, which holds all of them: `expert_weights`
    router: Tensor  # [experts, hidden], in the model's dtype or float32
    router_bias: Tensor | None  # [experts]
    shared_gate: Tensor | None  # [1, hidden]: what the sigmoid of weights the shared expert; None: 1
    correction: Tensor | None  # float32 [experts], added to scores to choose by
    choice: RouterConfig
    scales: Tensor | None = None  # float32 [experts]: what the weights of each are multiplied with in the end
    # float32 [hidden], where experts have norms apart from the feed-forward's beside them: `router_norm` and `norm` of
    # the residual, `after_norm` of what they add, `after_beside_norm` of what that adds
    norms: dict[str, Tensor] = field(default_factory=dict)
    router_module: nn.Module | None = None  # whose weight `router` is
    shared_gate_module: nn.Module | None = None


def expert_weights(routing: Routing, leaf: str) -> Weight:
    """`gate_up_proj` (gate, then up) or `down_proj` of all experts, one after the other: [experts * out, in]. Quantised
    ones are in the order that they are kept in (`takes_turns`)."""
    experts: Any = routing.experts
    weight = expert_weight_of(experts, leaf)
    if not isinstance(weight, Tensor):
        return weight
    return _in_order(experts, leaf, weight.transpose(1, 2) if experts.is_transposed else weight).flatten(0, 1)


def expert_bias(routing: Routing, leaf: str) -> Tensor | None:
    """[experts * out], in the order of `expert_weights`."""
    bias = getattr(routing.experts, f"{leaf}_bias", None)
    return None if bias is None else _in_order(routing.experts, leaf, bias.detach()).flatten()


def _in_order(experts: Any, leaf: str, outputs: Tensor) -> Tensor:
    """Of [experts, out, ...] whose gate and up values may take turns, gate and then up."""
    if leaf == "down_proj" or experts.is_concatenated:
        return outputs
    return torch.cat((outputs[:, ::2], outputs[:, 1::2]), 1)


def release_experts(routing: Routing) -> None:
    """Lets go of the experts' weights, which a decoder has taken over."""
    for leaf in ("gate_up_proj", "down_proj"):
        keep_quantized_experts(routing.experts, leaf, None)


_SCALES = ("routed_scaling_factor", "router_scaling_factor")


def lower_experts(block: Any, scores: Scores) -> Routing:
    """Of a layer's block with a router; `scores`: what makes scores of its outputs."""
    gate = block.gate if hasattr(block, "gate") else block.router
    shared_gate = getattr(block, "shared_expert_gate", None)
    owners = (gate, getattr(gate, "moe_statics", None), block)
    found = (getattr(owner, "e_score_correction_bias", None) for owner in owners)
    correction = next((bias for bias in found if bias is not None), None)
    linear = getattr(gate, "wg", gate)
    bias = getattr(linear, "bias", None)
    # DeepSeek V2's routers name it: their groups count by their best expert, and weights are scores as they are.
    method = getattr(gate, "topk_method", "")
    in_groups = method != "greedy"
    return Routing(
        experts=block.experts,
        router=linear.weight.detach(),
        router_bias=None if bias is None else bias.detach(),
        shared_gate=None if shared_gate is None else shared_gate.weight.detach(),
        correction=None if correction is None else correction.detach().float().flatten(),
        choice=RouterConfig(
            scores=scores,
            chosen=int(gate.top_k),
            normalised=bool(getattr(gate, "norm_topk_prob", not method)),
            groups=int(getattr(gate, "num_group", None) or 1) if in_groups else 1,
            top_groups=int(getattr(gate, "topk_group", None) or 1) if in_groups else 1,
            scale=float(next((getattr(gate, name) for name in _SCALES if hasattr(gate, name)), 1.0)),
            group_scores=1 if method else 2,
        ),
        router_module=linear,
        shared_gate_module=shared_gate,
    )


def lower_experts_apart(layer: Any, config: Any) -> Routing:
    """Gemma 4's: experts beside a feed-forward for all, each with norms before and behind it."""
    router = layer.router
    of_router = router.scale.detach().float() * float(router.scalar_root_size)
    own = {
        "norm": layer.pre_feedforward_layernorm_2,
        "after_norm": layer.post_feedforward_layernorm_2,
        "after_beside_norm": layer.post_feedforward_layernorm_1,
    }
    return Routing(
        experts=layer.experts,
        router=router.proj.weight.detach(),
        router_bias=None,
        shared_gate=None,
        correction=None,
        choice=RouterConfig("softmax", int(config.top_k_experts), True, 1, 1, 1.0),
        router_module=router.proj,
        scales=router.per_expert_scale.detach().float().contiguous(),
        norms={
            "router_norm": of_router.contiguous(),
            **{name: norm.weight.detach().float().contiguous() for name, norm in own.items()},
        },
    )
