"""Latent attention (MLA): a token keeps one short line, of which the keys and values of all heads are made.

    line     [latent: r | rotated part of the key: d]     of each token, whole on every rank
    weight   of a head: W_k [n, r] and W_v [v, r]          `kv_b_proj`, of this rank's heads

    score    q · (W_k latent) + q_rotated · rotated   =   [q W_k | q_rotated] · line
    output   sum of weights · (W_v latent)            =   W_v (sum of weights · latent)

Absorbed (the right side), lines are attended to as they are, by all heads as by queries of one KV head: a decode reads
r + d values of a token and no more. Expanded (the left side), keys and values are made of the lines, which costs
r (n + v) products a token and head, and then saves 2r - n - v of them for every row that attends to it: worth it for
long chunks. Which of the two follows from the rows of a chunk alone.

transformers' modules compute everything before and after (projections, norms, rotations, scales): in place of keys
and values they are given lines. Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from services.executor.core.sharding import ShardLayout
from services.executor.model.attention import (
    attend_all_decodes,
    keep_lines,
    lines_of,
    page_of,
    paged_attention,
    refuse_unsupported,
)
from services.executor.model.indexing import IndexerMasks
from services.executor.model.parallel.layers import LatentWeight
from services.executor.model.step_context import (
    PrefillChunk,
    ScoreRule,
    StepContext,
    attend_decodes,
    attend_prefill,
    causal,
)

# The attention of models in which some layers keep latents; their other layers have `paged_attention`.
LATENT_NAME = "ryzanstein_latent"

_CPU_BYTES = 32 << 20  # keys, values and scores of the heads of a chunk that are computed at once, on a CPU
_GPU_BYTES = 512 << 20


def register_latent_attention() -> None:
    """Makes the attention known to transformers. Call it before a model is built; twice does no harm."""
    AttentionInterface.register(LATENT_NAME, latent_attention)


def keep_latent(attention: Any, layout: ShardLayout) -> LatentWeight:
    """What holds the weight of `attention`'s `kv_b_proj`; from now on the module hands over lines as they are."""
    attention.expand_kv = _as_lines
    return LatentWeight(attention.kv_b_proj, layout, attention.qk_rope_head_dim)


def _as_lines(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of keys and values: [1, 1, T, r + d], twice."""
    lines = torch.cat((latents, rotated), dim=-1)
    return lines, lines


def latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepContext,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    indices: IndexerMasks | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stores the step's lines, then attends over each sequence's whole context.

    `query` [1, heads, T, n + d] of this rank, `key` lines [1, 1, T, r + d]; `s_aux` [heads] are attention sinks,
    `indices` what an indexer has chosen. Returns ([1, T, heads, v], None). Raises `ModelLoadError` when the model asks
    for what is not supported.
    """
    weight = module.kv_b_proj if hasattr(module, "kv_b_proj") else None
    if not isinstance(weight, LatentWeight):
        return paged_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            step=step,
            scaling=scaling,
            sliding_window=sliding_window,
            s_aux=s_aux,
            **others,
        )
    refuse_unsupported(attention_mask if indices is None else None, others)
    rule = ScoreRule(scaling, sinks=None if s_aux is None else s_aux.view(1, -1))
    rows, lines, page = query[0].transpose(0, 1), key[0], page_of(module)
    keep_lines(step, page, (lines,))
    out = rows.new_empty(*rows.shape[:2], weight.value_width)
    if count := step.num_decodes:
        step.narrow(0, count)
        latents = rows.new_empty(count, 1, weight.heads, weight.rank)
        absorbed = weight.absorbed(rows[:count])
        chosen = None if indices is None else indices.decodes
        attend_all_decodes(step, page, step.decodes(sliding_window), absorbed, rule, latents, chosen)
        out[:count] = weight.outputs(latents)
    for index, chunk in enumerate(step.prefills(sliding_window)):
        seen = lines_of(step, page, chunk, (lines,))[0][0]
        mask = _among(chunk, None if indices is None else indices.prefills[index])
        own = slice(chunk.start, chunk.stop)
        step.narrow(chunk.start, chunk.stop)
        out[own] = _attend_chunk(rows[own], seen, mask, weight, rule)
    step.narrow(0, len(rows))
    step.on_layer()
    return out.unsqueeze(0), None


def _among(chunk: PrefillChunk, chosen: Tensor | None) -> Tensor | None:
    """The chunk's mask, with what is not `chosen` bool [rows, K] hidden too."""
    if chosen is None:
        return chunk.mask
    mask = causal(len(chosen), chosen.device) if chunk.mask is None else chunk.mask
    return mask.masked_fill(~chosen, float("-inf"))


def _attend_chunk(query: Tensor, lines: Tensor, mask: Tensor | None, weight: LatentWeight, rule: ScoreRule) -> Tensor:
    """A chunk of one sequence, `query` [rows, heads, n + d] over `lines` [K, r + d]: [rows, heads, v]."""
    out = query.new_empty(*query.shape[:2], weight.value_width)
    expands = query.shape[0] >= weight.expands_from
    absorbed = query if expands else weight.absorbed(query)[:, 0]
    latents = out if expands else query.new_empty(*query.shape[:2], weight.rank)
    for heads in _head_groups(query, lines):
        own = rule if rule.sinks is None else replace(rule, sinks=rule.sinks[:, heads])
        if expands:
            keys, values = weight.expanded(lines, heads)
            out[:, heads] = _over_heads(query[:, heads], keys, values, mask, own)
        else:
            latents[:, heads] = over_lines(absorbed[:, heads], lines, mask, own, weight.rank)
    return out if expands else weight.outputs(latents.unsqueeze(1))


def _head_groups(query: Tensor, lines: Tensor) -> Iterator[slice]:
    """Heads that are computed at once, so that memory is bounded whatever the context is."""
    rows, heads, width = query.shape
    limit = _CPU_BYTES if query.device.type == "cpu" else _GPU_BYTES
    step = max(1, limit // (lines.shape[0] * (rows * 4 + 2 * width * query.itemsize)))
    for first in range(0, heads, step):
        yield slice(first, min(first + step, heads))


def _over_heads(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """`query` [rows, heads, d] over `keys` [heads, K, d] and `values` [heads, K, v]: [rows, heads, v]."""
    width = values.shape[-1]
    if rule.is_plain and width < keys.shape[-1]:
        values = pad(values, (0, keys.shape[-1] - width))  # the fast operator wants both as wide
    queries = query.transpose(0, 1).unsqueeze(1)
    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks.view(-1, 1))
    return attend_prefill(queries, keys, values, mask, rule)[:, 0, :, :width].transpose(0, 1)


def over_lines(query: Tensor, lines: Tensor, mask: Tensor | None, rule: ScoreRule, rank: int) -> Tensor:
    """`query` [rows, heads, r + d] over `lines` [K, r + d]: sums of latents [rows, heads, r].

    As decodes of rows sequences that share their keys: all heads are rows of one product.
    """
    rows, heads, width = query.shape
    if mask is None:
        mask = causal(rows, query.device, query.dtype)
    flat = query.reshape(1, 1, rows * heads, width)
    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks.repeat(1, rows))
    mask = mask.repeat_interleave(heads, dim=0)[None, None]
    made = attend_decodes(flat, lines[None, None], lines[None, None, :, :rank], mask, rule)
    return made.view(rows, heads, rank)
