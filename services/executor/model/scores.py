"""Attention over keys and values that lie dense in memory, whatever a model does with its scores.

    scores = soft cap(scale * q . k) + mask + bias      bias: linear in the key's position (ALiBi)
    weights = softmax([scores | sink])                  a sink takes weight and gives no value

Where a model has neither caps nor sinks this is `scaled_dot_product_attention`; otherwise plain
matrix products with the scores in float32.
Sources: Press et al., "ALiBi", https://arxiv.org/abs/2108.12409; Gemma Team, "Gemma 2",
https://arxiv.org/abs/2408.00118; OpenAI, "gpt-oss model card", https://arxiv.org/abs/2508.10925.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

KeyBias = Callable[[Tensor], Tensor]
"""int64 [K] key positions -> float [kv heads, group, K], what is added to scores that are scaled already."""


@dataclass(frozen=True)
class ScoreRule:
    """How a layer's scores become weights."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """[kv heads, group]"""
    key_bias: KeyBias | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend_decodes(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: ScoreRule) -> Tensor:
    """One token of each of n sequences. Returns [n, kv heads, group, d].

    `queries` [n, kv heads, group, d], `keys` and `values` [n, kv heads, K, d], `mask` [n, 1, 1, K].
    """
    if rule.key_bias is not None:
        mask = mask + _bias(rule.key_bias, mask)
    if rule.is_plain:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=rule.scale)
    sinks = None if rule.sinks is None else rule.sinks[None, :, :, None]
    return _attend(queries, keys, values, mask, sinks, rule)


def attend_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: ScoreRule
) -> Tensor:
    """A chunk of one sequence. Returns [kv heads, group, rows, d].

    `queries` [kv heads, group, rows, d], `keys` and `values` [kv heads, K, d], `mask` [rows, K] or None for
    a chunk that starts its sequence (then K = rows and attention is causal).
    """
    group = queries.shape[1]
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    if mask is None and not (rule.is_plain and rule.key_bias is None):
        mask = _causal(queries)
    if rule.key_bias is not None and mask is not None:
        mask = mask + _bias(rule.key_bias, mask).unsqueeze(-2)
    if rule.is_plain:
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=rule.scale
        )
    sinks = None if rule.sinks is None else rule.sinks[:, :, None, None]
    return _attend(queries, keys, values, mask, sinks, rule)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None, rule: ScoreRule
) -> Tensor:
    scores = (queries @ keys.transpose(-1, -2)).float() * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(values.dtype) @ values
    column = sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values


def _bias(key_bias: KeyBias, mask: Tensor) -> Tensor:
    # Models with linear biases have no sliding window, so the first key is the sequence's first token.
    return key_bias(torch.arange(mask.shape[-1], device=mask.device)).to(mask.dtype)


def _causal(queries: Tensor) -> Tensor:
    rows = queries.shape[-2]
    hidden = torch.full((rows, rows), float("-inf"), dtype=queries.dtype, device=queries.device)
    return hidden.triu(1)
