"""Feed-forward modules that need more than their linear layers split.

Llama 4     its experts compute every token, chosen or not: they get a forward that computes those chosen
Gemma 3n    cuts off what lies below a quantile of all the inner values, of which a rank has a share
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.collectives.base import Collectives
from services.executor.families.registry import family_of
from services.executor.model.parallel.layers import expert_product


def adapt_feed_forwards(model: nn.Module, config: Any, collectives: Collectives) -> None:
    """Gives those modules of the architecture their forward, before they are split."""
    adapt = _ADAPTED.get(family_of(config.model_type).own_feed_forward)
    if adapt is not None:
        for module in model.modules():
            adapt(module, collectives)


def _llama4(module: Any, collectives: Collectives) -> None:
    if type(module).__name__ == "Llama4TextMoe":
        module.experts.is_transposed = module.experts.is_concatenated = True
        module.experts.forward = partial(_chosen_experts, module.experts)
        module.forward = partial(_mixture, module)


def _mixture(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The shared expert and those chosen, of which each counts by what its inputs are multiplied with."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    scores, logits = module.router(rows)
    weights, chosen = scores.topk(module.top_k, dim=-1)
    return module.shared_expert(rows) + module.experts(rows, chosen, weights), logits


def _chosen_experts(experts: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`rows` [T, hidden], `chosen` int64 and `weights` [T, k]: [T, hidden]."""
    out = torch.zeros_like(rows)
    for expert in sorted(set(chosen.flatten().tolist())):
        at, place = (chosen == expert).nonzero(as_tuple=True)
        taken = rows[at] * weights[at, place].unsqueeze(-1)
        gate, up = expert_product(experts, "gate_up_proj", expert, taken).chunk(2, dim=-1)
        out.index_add_(0, at, expert_product(experts, "down_proj", expert, up * experts.act_fn(gate)))
    return out


def _gemma3n(module: Any, collectives: Collectives) -> None:
    if type(module).__name__ == "Gemma3nTextMLP" and collectives.world_size > 1:
        module._gaussian_topk = partial(_cut_off, module, collectives)  # noqa: SLF001  # its forward calls it


def _cut_off(module: Any, collectives: Collectives, share: Tensor) -> Tensor:
    """`share` [..., inner values of this rank] less the quantile of all ranks' values, where it is above it."""
    values, width = share.float(), module.intermediate_size
    mean = collectives.all_reduce(values.sum(-1, keepdim=True)) / width
    variance = collectives.all_reduce((values - mean).square().sum(-1, keepdim=True)) / width
    quantile = statistics.NormalDist().inv_cdf(module.activation_sparsity)
    return torch.relu(share - (mean + variance.sqrt() * quantile).to(share.dtype))


# By `own_feed_forward` of a family, for every module.
_ADAPTED: Mapping[str, Callable[[Any, Collectives], None]] = MappingProxyType({"gemma3n": _gemma3n, "llama4": _llama4})
