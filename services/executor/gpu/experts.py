"""A layer's mixture of experts on a GPU: see `kernels/experts.py`. Of models that PyTorch runs, too, which choose for
themselves.

The router, and what gates the shared expert, are one product in float32, as the routers that choose by sigmoid scores
are defined. Experts are multiplied by as they were loaded: plain, eight bits with a scale for each row, or codes with
scales for groups. All of it waits for nothing on the host.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from services.executor.gpu.adapters import DecoderAdapters
from services.executor.gpu.attention import processors_of
from services.executor.gpu.kernels import elementwise, experts, low_rank
from services.executor.gpu.kernels.experts import Routed, RoutingRule, arrivals_of
from services.executor.gpu.kernels.grouped import PackedRows
from services.executor.gpu.quantized_matmul import in_order
from services.executor.model.lowered_experts import RouterConfig, Routing, expert_weights, release_experts
from services.executor.model.parallel.layers import (
    EXPERT_WEIGHTS,
    expert_weight_of,
    holds_experts,
    keep_quantized_experts,
)
from services.executor.model.products import MakeProduct
from services.executor.model.weight_formats import Quantized, Weight


class Mixture:
    """Holds the experts of one layer. `arrivals` (`experts.arrivals_of`) are those of all layers."""

    def __init__(self, routing: Routing, make: MakeProduct, arrivals: Tensor, *, gelu: bool, invariant: bool) -> None:
        """Takes over the weights of `routing`. `invariant`: what a row comes to does not depend on the others."""
        gates = [gate for gate in (routing.router, routing.shared_gate) if gate is not None]
        biases = [torch.zeros(len(gate), device=gate.device) for gate in gates]
        if routing.router_bias is not None:
            biases[0] = routing.router_bias.float()
        self._router = make(torch.cat([gate.float() for gate in gates]), torch.cat(biases))
        self._count, self._device = len(routing.router), arrivals.device
        self._correction, self._rule, self._gelu = routing.correction, rule_of(routing.choice), gelu
        self._tile = experts.MOST_TILE if invariant else 0
        how = (self._count, arrivals, 0 if invariant else processors_of(arrivals.device))
        self._gate_up, self._down = (StackedProduct(expert_weights(routing, leaf), *how) for leaf in EXPERT_WEIGHTS)
        release_experts(routing)

    def take_adapters(self, adapters: DecoderAdapters, path: str) -> None:
        """Has `adapters` change the experts, which the model calls `path`."""
        self._adapters = adapters
        self._adapted = [
            adapters.product([f"{path}.{leaf}"], [product.outputs], self._device)
            for leaf, product in zip(EXPERT_WEIGHTS, (self._gate_up, self._down), strict=True)
        ]

    def __call__(self, x: Tensor, slots: Tensor, shared: Tensor | None, adapters: Tensor | None = None) -> Tensor:
        """[T, hidden] of `x` [T, hidden], plus what the shared expert has made of it, if there is one. A row with a
        negative one of `slots` [T] goes to no expert; `adapters` int32 [T]: slots of the rows' LoRA adapters."""
        logits = self._router(x.float())
        routed = experts.route(logits, self._correction, slots, self._count, self._rule, self._tile)
        if adapters is None:
            inner = elementwise.gated(self._gate_up(x, routed), gelu=self._gelu)
            return experts.combine(self._down(inner, routed), routed, self._count, shared, logits)
        entry, out = self._adapted
        pairs = low_rank.pairs_by_slot(adapters, routed.chosen, self._adapters.slots, self._count)
        inner = elementwise.gated(entry.add(x, self._gate_up(x, routed), pairs), gelu=self._gelu)
        made = out.add(inner, self._down(inner, routed), pairs)
        return experts.combine(made, routed, self._count, shared, logits)


# Adds to the last, [T * K, out] of the rows' experts, the second, [T, K], what is made of the first.
AddOfPairs = Callable[[Tensor, Tensor, Tensor], None]


def _nothing(x: Tensor, chosen: Tensor, made: Tensor) -> None:
    return


class ModuleExperts:
    """In place of the forward pass of `module`, transformers' own, whose rows PyTorch has routed."""

    def __init__(self, module: Any, arrivals: Tensor) -> None:
        """Takes over the weights of `module`."""
        self._count, self._apply_gate = module.num_experts, module._apply_gate  # noqa: SLF001  # transformers' own
        how = (self._count, arrivals, processors_of(arrivals.device))
        self._gate_up, self._down = (StackedProduct(expert_weight_of(module, leaf), *how) for leaf in EXPERT_WEIGHTS)
        for leaf in EXPERT_WEIGHTS:
            keep_quantized_experts(module, leaf, None)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden], by transformers' names: `top_k_index` and `top_k_weights` are [T, K]."""
        return self.with_adapters(hidden_states, top_k_index, top_k_weights, _nothing, _nothing)

    def with_adapters(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, entry: AddOfPairs, out: AddOfPairs
    ) -> Tensor:
        """The same, where `entry` and `out` add to what leads into the experts and out of them."""
        chosen, weights = top_k_index.int().contiguous(), top_k_weights.float().contiguous()
        routed = experts.sort(chosen, weights, self._count)
        gate_up = self._gate_up(hidden_states, routed)
        entry(hidden_states, chosen, gate_up)
        inner = self._apply_gate(gate_up)
        made = self._down(inner, routed)
        out(inner, chosen, made)
        return experts.combine(made, routed, self._count)


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
        self.outputs = weight.outputs if isinstance(weight, PackedRows) else weight.shape[0] // count

    def __call__(self, x: Tensor, routed: Routed) -> Tensor:
        """[T * K, out] of `x`, one row for each row of the step or for each pair."""
        weight, outputs = self._weight, self.outputs
        splits = experts.splits_for(routed, outputs, weight.shape[1], self._processors)
        if isinstance(weight, PackedRows):
            return experts.multiply_stacked_groups(in_order(x, weight), weight, routed, self._arrivals, splits)
        codes, scales = weight if isinstance(weight, Quantized) else (cast("Tensor", weight), None)
        return experts.multiply_stacked(x, codes, scales, routed, outputs, self._arrivals, splits)


def rule_of(choice: RouterConfig) -> RoutingRule:
    numbers = (choice.groups, choice.top_groups, choice.scale)
    return RoutingRule(choice.chosen, choice.scores == "sigmoid", choice.normalised, *numbers)
