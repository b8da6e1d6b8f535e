"""Lightning attention: linear attention whose state decays at a rate of its own for each head, over a sequence's slot.

transformers' own goes on from a state token by token, in the model's dtype. This one takes blocks from any state, in
float32: with i tokens of the block up to a row, and its state S before it,

    out_i = fade^i q_i S + sum over j <= i of fade^(i - j) (q_i . k_j) v_j
    S     = fade^n S + sum over j of fade^(n - j) k_j v_j

Split by heads: qkv_proj has [q k v] of a head, then the next one's; output_gate, norm and out_proj by heads.
Source: Qin et al., "Lightning Attention-2", https://arxiv.org/abs/2401.04658.
"""

from typing import Any

import torch
from torch import Tensor

from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.parallel.layers import WideNorm
from services.executor.model.parallel.mixers.split import MixerSplit, output_span
from services.executor.model.states.base import linear_heads

# Tokens: within a block work grows with its square, between blocks it is one product with the state.
_BLOCK = 64
# Buffers of transformers' module that follow from the configuration, and are not needed.
_DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def lightning(config: Any, layout: ShardLayout) -> MixerSplit:
    heads = linear_heads(config, layout)
    size = heads.head_dim
    span, counted = heads.q_heads.scaled(size), heads.output_heads.scaled(size)
    return MixerSplit(
        outputs={"qkv_proj": (heads.q_heads.scaled(3 * size),), "output_gate": (span,)},
        replaced={"norm": lambda norm, ranks: WideNorm(norm, span, counted, ranks)},
        inputs={"out_proj": output_span(heads, size)},
        let_go=_DERIVED,
        adapt=lambda module, collectives: _fade_by_heads(module, heads.q_heads),
    )


def _fade_by_heads(module: Any, heads: ShardRange) -> None:
    """Has transformers' `module`, of whose heads this rank holds `heads`, compute with a slot of states."""
    rates = module.get_slope_rate().float()[heads.start : heads.stop]
    module.register_buffer("rates", rates, persistent=False)

    def forward(hidden_states: Tensor, past_key_values: Any, **others: object) -> tuple[Tensor, None]:
        batch, tokens = hidden_states.shape[:2]
        projected = module.act_fn(module.qkv_proj(hidden_states)).float()
        heads = projected.view(batch, tokens, -1, 3 * module.head_dim).transpose(1, 2)
        query, key, value = heads.split(module.head_dim, dim=-1)
        state = past_key_values.tensors["recurrent"]
        parts = []
        for start in range(0, tokens, _BLOCK):
            block = slice(start, start + _BLOCK)
            out, state = faded(query[:, :, block], key[:, :, block], value[:, :, block], state, module.rates)
            parts.append(out)
        past_key_values.update_recurrent_state(state, module.layer_idx)
        mixed = module.norm(torch.cat(parts, dim=2).transpose(1, 2).flatten(2)).to(hidden_states.dtype)
        return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * mixed), None

    module.forward = forward


def faded(query: Tensor, key: Tensor, value: Tensor, state: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """(out [n, heads, T, d], the state after it) of one block, all float32.

    `query`, `key`, `value` [n, heads, T, d]; `state` [n, heads, d, d]; `rates` [heads, 1, 1], fade = exp(-rate).
    """
    tokens = query.shape[2]
    age = torch.arange(tokens, device=query.device, dtype=torch.float32)
    between = age[:, None] - age
    seen = torch.exp(-rates * between.clamp(min=0)).masked_fill(between < 0, 0)
    before = (query * torch.exp(-rates * (age[:, None] + 1))) @ state
    out = before + (query @ key.transpose(-1, -2) * seen) @ value
    left = key * torch.exp(-rates * (tokens - 1 - age[:, None]))
    return out, torch.exp(-rates * tokens) * state + left.transpose(-1, -2) @ value
