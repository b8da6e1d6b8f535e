"""Causal attention over a packed batch, reached from transformers' models by name.

    rows   [ a0 a1 a2 | b0 | c0 c1 ]      a row attends to the rows of its own example alone, up to itself

Each example is attended to by itself, with nothing padded, so that what it gives is what it would give alone.
What `scaled_dot_product_attention` cannot express (caps of scores, sinks) is computed some rows at a time, in float32,
and again for the gradients, so that no more than those rows' scores are held.
Sources: Gemma Team, "Gemma 2", https://arxiv.org/abs/2408.00118; OpenAI, "gpt-oss model card",
https://arxiv.org/abs/2508.10925.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from services.executor.model.attention import WINDOW_ATTRIBUTE, refuse_unsupported
from services.executor.training.base.linear import Pass

ATTENTION_NAME = "ryzanstein_training"  # no mask function goes by this name, so transformers builds no mask
# Where an attention module has the pass that is under way, the one entry of a list.
CURRENT_ATTRIBUTE = "current_pass"

_ROWS = 256  # whose scores are held at once, where they are held
# Tokens up to which an example is attended to by plain products on CPUs: PyTorch's fused kernel takes longer there,
# backward most of all (bf16, 100 tokens: three times as long).
_SHORT = 256


def register_training_attention() -> None:
    """Makes the attention known to transformers; twice does no harm."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` [1, heads, T, d], `key` and `value` [1, KV heads, T, d or v]; `s_aux` [heads] are attention sinks. Rows
    that are `sliding_window` apart or more do not see each other. Returns ([1, T, heads, v], None).

    Raises `ModelLoadError` when the model asks for what is not supported.
    """
    refuse_unsupported(attention_mask, others)
    current: list[Pass] = module.__dict__[CURRENT_ATTRIBUTE]
    window = module.__dict__.get(WINDOW_ATTRIBUTE) if sliding_window is None else sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths = current[0].lengths
    outs = []
    for q, k, v in zip(*(torch.split(whole, lengths, dim=2) for whole in (query, key, value)), strict=True):
        if softcap is None and s_aux is None:
            outs.append(_plain(q, k, v, scale, window).transpose(1, 2))
        else:
            outs.append(_by_rows(q, k, v, scale, window, softcap, s_aux).transpose(1, 2))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), None


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """[1, heads, L, v] of one example."""
    length = q.shape[2]
    if q.device.type == "cpu" and length <= _SHORT:
        seen = _seen(0, length, length, window, q.device)
        short: Tensor = _Short.apply(q[0], k[0], v[0], seen, scale)  # type: ignore[no-untyped-call]
        return short.unsqueeze(0)
    mask = None if window is None or length <= window else _seen(0, length, length, window, q.device)
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


class _Short(torch.autograd.Function):
    """[heads, L, v] of `q` [heads, L, d], `k` and `v` [KV heads, L, d or v]; keeps nothing but these for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, seen)
        ctx.scale = scale
        weights = _weights(_grouped(q, k), k, seen, scale).to(v.dtype)
        return (weights @ v).view(*q.shape[:2], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, seen = ctx.saved_tensors
        queries, out = _grouped(q, k), _grouped(gradients[0], v)
        weights = _weights(queries, k, seen, ctx.scale)
        dv = weights.to(v.dtype).transpose(1, 2) @ out
        of_weights = (out @ v.transpose(1, 2)).float()
        of_weights -= (of_weights * weights).sum(-1, keepdim=True)
        scores = of_weights.mul_(weights).mul_(ctx.scale).to(q.dtype)
        return (scores @ k).view(q.shape), scores.transpose(1, 2) @ queries, dv, None, None


def _grouped(rows: Tensor, like: Tensor) -> Tensor:
    """[KV heads, group * L, d]: the rows of all heads that share one of `like`."""
    return rows.reshape(like.shape[0], -1, rows.shape[-1])


def _weights(queries: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """float32 [KV heads, group * L, L]"""
    scores = (queries @ k.transpose(1, 2)).float().mul_(scale)
    by_rows = scores.view(k.shape[0], -1, *seen.shape)
    return torch.softmax(by_rows.masked_fill_(~seen, float("-inf")), dim=-1).view_as(scores)


def _by_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """As `_plain`, with scores of some rows at a time."""
    length, kv_heads = q.shape[2], k.shape[1]
    grouped = q[0].view(kv_heads, -1, *q.shape[2:])
    of_groups = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
    outs = []
    for first in range(0, length, _ROWS):
        end = min(first + _ROWS, length)
        begin = 0 if window is None else max(0, first - window + 1)
        seen = _seen(first - begin, end - begin, end - begin, window, q.device)
        parts = (grouped[:, :, first:end], k[0, :, begin:end], v[0, :, begin:end])
        outs.append(
            checkpoint(_scored, *parts, seen, scale, softcap, of_groups, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(outs, dim=2).flatten(0, 1).unsqueeze(0)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[KV heads, group, rows, v] of `q` [KV heads, group, rows, d], `k` and `v` [KV heads, K, d or v]."""
    scores = (q @ k.unsqueeze(1).transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.to(v.dtype) @ v.unsqueeze(1)


def _seen(first: int, end: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [end - first, length]: which tokens of an example its rows [first, end) see."""
    at = torch.arange(length, device=device)
    back = at[first:end, None] - at
    return back >= 0 if window is None else (back >= 0) & (back < window)
