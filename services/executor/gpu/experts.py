"""A layer's mixture of experts on a GPU: see `kernels/experts.py`. Of models that PyTorch runs, too, which choose for
themselves.

The router, and what gates the shared expert, are one product in float32, as the routers that choose by sigmoid scores
are defined. Experts are multiplied by as they were loaded: plain, eight bits with a scale for each row, or codes with
scales for groups. All of it waits for nothing on the host.
"""

from typing import Any, cast

import torch
from torch import Tensor

from services.executor.gpu.attention import processors_of
from services.executor.gpu.kernels import elementwise, experts
from services.executor.gpu.kernels.experts import Routed, Rule, arrivals_of
from services.executor.gpu.kernels.grouped import PackedRows
from services.executor.gpu.linear import MakeProduct
from services.executor.gpu.quantized_matmul import in_order
from services.executor.model.lowered_experts import Choice, Routing, expert_weights, release_experts
from services.executor.model.parallel.layers import (
    EXPERT_WEIGHTS,
    expert_weight_of,
    holds_experts,
    keep_quantized_experts,
)
from services.executor.model.weight_formats import Quantized, Weight


class Mixture:
    """Holds the experts of one layer. `arrivals` (`experts.arrivals_of`) are those of all layers."""

    def __init__(
        self, routing: Routing, make: MakeProduct, arrivals: Tensor, *, gelu: bool, invariant: bool
    ) -> None:
        """Takes over the weights of `routing`. `invariant`: what a row comes to does not depend on the others."""
        gates = [gate for gate in (routing.router, routing.shared_gate) if gate is not None]
        biases = [torch.zeros(len(gate), device=gate.device) for gate in gates]
        if routing.router_bias is not None:
            biases[0] = routing.router_bias.float()
        self._router = make(torch.cat([gate.float() for gate in gates]), torch.cat(biases))
        self._count = len(routing.router)
        self._correction, self._rule, self._gelu = routing.correction, rule_of(routing.choice), gelu
        self._tile = experts.MOST_TILE if invariant else 0
        how = (self._count, arrivals, 0 if invariant else processors_of(arrivals.device))
        self._gate_up, self._down = (
            StackedProduct(expert_weights(routing, leaf), *how) for leaf in EXPERT_WEIGHTS
        )
        release_experts(routing)

    def __call__(self, x: Tensor, slots: Tensor, shared: Tensor | None) -> Tensor:
        """[T, hidden] of `x` [T, hidden], plus what the shared expert has made of it, if there is one. A row with a
        negative one of `slots` [T] goes to no expert."""
        logits = self._router(x.float())
        routed = experts.route(logits, self._correction, slots, self._count, self._rule, self._tile)
        inner = elementwise.gated(self._gate_up(x, routed), gelu=self._gelu)
        return experts.combine(self._down(inner, routed), routed, self._count, shared, logits)


class ModuleExperts:
    """In place of the forward pass of `module`, transformers' own, whose rows PyTorch has routed."""

    def __init__(self, module: Any, arrivals: Tensor) -> None:
        """Takes over the weights of `module`."""
        self._count, self._apply_gate = module.num_experts, module._apply_gate  # noqa: SLF001  # transformers' own
        how = (self._count, arrivals, processors_of(arrivals.device))
        self._gate_up, self._down = (
            StackedProduct(expert_weight_of(module, leaf), *how) for leaf in EXPERT_WEIGHTS
        )
        for leaf in EXPERT_WEIGHTS:
            keep_quantized_experts(module, leaf, None)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden], by transformers' names: `top_k_index` and `top_k_weights` are [T, K]."""
        chosen, weights = top_k_index.int().contiguous(), top_k_weights.float().contiguous()
        routed = experts.sort(chosen, weights, self._count)
        inner = self._apply_gate(self._gate_up(hidden_states, routed))
        return experts.combine(self._down(inner, routed), routed, self._count)


def use_expert_kernels(model: Any, device: torch.device) -> None:
    """Has the experts of `model`, which PyTorch runs on `device`, computed by the kernels, where they hold weights
    in the order that these know."""
    arrivals = arrivals_of(processors_of(device), device)
    for module in model.modules():
        if all(holds_experts(module, leaf) for leaf in EXPERT_WEIGHTS):
            module.forward = ModuleExperts(module, arrivals)


class StackedProduct:
    """Of rows with the weights of their experts."""

    def __init__(self, weight: Weight, count: int, arrivals: Tensor, processors: int) -> None:
        """`weight` of all `count` experts: [experts, out, in], [experts * out, in], or `PackedRows.stacked`.
        `processors` 0: inputs are not split."""
        weight = weight.view(-1, weight.shape[-1]) if isinstance(weight, Tensor) else weight
        self._weight, self._arrivals, self._processors = weight, arrivals, processors
        self._outputs = weight.outputs if isinstance(weight, PackedRows) else weight.shape[0] // count

    def __call__(self, x: Tensor, routed: Routed) -> Tensor:
        """[T * K, out] of `x`, one row for each row of the step or for each pair."""
        weight, outputs = self._weight, self._outputs
        splits = experts.splits_for(routed, outputs, weight.shape[1], self._processors)
        if isinstance(weight, PackedRows):
            return experts.multiply_stacked_groups(
                in_order(x, weight), weight, routed, self._arrivals, splits
            )
        codes, scales = weight if isinstance(weight, Quantized) else (cast("Tensor", weight), None)
        return experts.multiply_stacked(x, codes, scales, routed, outputs, self._arrivals, splits)


def rule_of(choice: Choice) -> Rule:
    numbers = (choice.groups, choice.top_groups, choice.scale)
    return Rule(choice.chosen, choice.scores == "sigmoid", choice.normalised, *numbers)
