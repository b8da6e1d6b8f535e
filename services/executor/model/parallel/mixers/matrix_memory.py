"""xLSTM's matrix memory (mLSTM), split over the ranks by heads and computed from any state.

With i tokens of a block up to a row, F the sums of the logarithms of its forget gates, I its input gates:

    C_i   = exp(F_i) C_0 + sum over j <= i of exp(F_i - F_j + I_j) k_j [v_j | 1]
    out_i = the first part of q_i C_i / max(|its last number|, 1)

All of it is kept over exp(most), the largest of its exponents. Within a block it is a product under a mask of weights,
as attention is. transformers computes chunks in `autocast_kernel_dtype`, this in float32.

    q, k, v, ogate_preact, multihead_norm, inputs of out_proj by heads;  igate_preact, fgate_preact: one number each

Source: Beck et al., "xLSTM", https://arxiv.org/abs/2405.04517, section 2.3 and appendix A.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.model.parallel.mixers.split import MixerSplit, output_span
from services.executor.model.recurrent import StateCache
from services.executor.model.states.linear_attention import memory_widths

# Tokens: within a block work grows with its square, between blocks it is one product with the state.
_BLOCK = 64


def matrix_memory(config: Any, layout: ShardLayout) -> MixerSplit:
    key_dim, value_dim = memory_widths(config)
    heads = layout.q_heads
    keys, values = (heads.scaled(key_dim),), (heads.scaled(value_dim),)
    return MixerSplit(
        outputs={
            "q": keys,
            "k": keys,
            "v": values,
            "ogate_preact": values,
            "igate_preact": (heads,),
            "fgate_preact": (heads,),
        },
        values=dict.fromkeys(("multihead_norm.weight", *(("multihead_norm.bias",) if config.use_bias else ())), values),
        inputs={"out_proj": output_span(layout, value_dim)},
        attributes={"multihead_norm.num_heads": heads.size},
        adapt=_remember,
    )


def _remember(module: Any, collectives: Collectives) -> None:
    cap: float = module.config.gate_soft_cap
    epsilon: float = module.config.eps
    # Longer steps the model would cut, with a cache of its own.
    module.config.max_inference_chunksize = sys.maxsize

    def forward(x: Tensor, cache: StateCache, **others: object) -> tuple[Tensor, None]:
        heads = module.multihead_norm.num_heads
        query, key, value = (
            part(x).float().unflatten(-1, (heads, -1)).transpose(1, 2) for part in (module.q, module.k, module.v)
        )
        entry, forget = (
            (cap * torch.tanh(part(x).float() / cap)).transpose(1, 2)
            for part in (module.igate_preact, module.fgate_preact)
        )
        memory, most = cache.tensors["memory"], cache.tensors["most"]
        kept, parts = (memory, most), []
        for first in range(0, x.shape[1], _BLOCK):
            block = slice(first, first + _BLOCK)
            out, kept = remembered(
                query[:, :, block],
                key[:, :, block],
                value[:, :, block],
                entry[:, :, block],
                functional.logsigmoid(forget[:, :, block]),
                kept,
                epsilon,
            )
            parts.append(out)
        memory.copy_(kept[0])
        most.copy_(kept[1])
        read = module.multihead_norm(torch.cat(parts, dim=2).transpose(1, 2).to(x.dtype))
        return module.out_proj(torch.sigmoid(module.ogate_preact(x)) * read), None

    module.forward = forward


def remembered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    entry: Tensor,
    forget: Tensor,
    kept: tuple[Tensor, Tensor],
    epsilon: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(out [n, heads, T, v], what is kept behind it) of one block, all float32.

    `query`, `key` [n, heads, T, k], `value` [n, heads, T, v]; `entry` and the logarithms `forget` [n, heads, T];
    `kept`: the memory [n, heads, k, v + 1] over exp(most), and most [n, heads].
    """
    memory, most = kept
    tokens = query.shape[2]
    faded = forget.cumsum(-1)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    exponents = faded[..., :, None] - faded[..., None, :] + entry[..., None, :]
    exponents = exponents.masked_fill(later, float("-inf"))
    before = faded + most[..., None]
    largest = torch.maximum(before, exponents.amax(-1))
    terms = functional.pad(value, (0, 1), value=1.0)
    asked = query * query.shape[-1] ** -0.5
    read = (asked @ key.transpose(-1, -2) * torch.exp(exponents - largest[..., None])) @ terms
    read = read + torch.exp(before - largest)[..., None] * (asked @ memory)
    norm = torch.maximum(read[..., -1:].abs(), torch.exp(-largest)[..., None])
    last = largest[..., -1]
    entering = key * torch.exp(exponents[..., -1, :] - last[..., None])[..., None]
    memory = torch.exp(before[..., -1] - last)[..., None, None] * memory + entering.transpose(-1, -2) @ terms
    return read[..., :-1] / (norm + epsilon), (memory, last)
