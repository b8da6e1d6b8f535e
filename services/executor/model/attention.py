"""Paged attention in plain PyTorch, reached from transformers' models by name.

Works on any device: blocks are gathered into a dense buffer and handed to
`scaled_dot_product_attention`, or to `step_context.py` where that operator cannot express what the model does.
Query heads that share a KV head are laid out as queries of that head, so keys and values are never repeated.

    decodes   q [n, kv heads, group, d]     one batched call per bucket of similar lengths
    prefill   q [kv heads, group, rows, d]  one call per sequence
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from services.executor.model.step_context import (
    DecodeBatch,
    KeyBias,
    PrefillChunk,
    ScoreRule,
    StepContext,
    attend_decodes,
    attend_prefill,
)
from shared.errors import ModelLoadError

ATTENTION_NAME = "ryzanstein_paged"
"""No mask function goes by this name, so transformers builds no mask; causality is the matter of this file."""

WINDOW_ATTRIBUTE = "window_of_mask"
"""Where an attention module that does not pass its sliding window on has it."""

_HARMLESS = frozenset({"position_ids", "cache_position"})


def register_attention() -> None:
    """Makes the attention known to transformers. Call it before a model is built; twice does no harm."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    key_bias: KeyBias | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stores the step's keys and values, then attends over each sequence's whole context.

    `query` [1, q heads, T, d], `key` and `value` [1, kv heads, T, d], all local to this rank; `s_aux`
    [q heads] are attention sinks, `key_bias` makes linear biases. Returns ([1, T, q heads, d], None).
    Raises `ModelLoadError` when the model asks for what is not supported.
    """
    _refuse_unsupported(attention_mask, value.shape[-1] == key.shape[-1], others)
    layer: int = module.layer_idx  # type: ignore[assignment]
    _write(step, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    kv_heads = key.shape[1]
    rows = query[0].transpose(0, 1)
    tokens, heads, width = rows.shape
    grouped = rows.view(tokens, kv_heads, heads // kv_heads, width)
    out = torch.empty(grouped.shape, dtype=query.dtype, device=query.device)
    sinks = None if s_aux is None else s_aux.view(kv_heads, heads // kv_heads)
    rule = ScoreRule(width**-0.5 if scaling is None else scaling, softcap, sinks, key_bias)
    window = module.__dict__.get(WINDOW_ATTRIBUTE) if sliding_window is None else sliding_window
    if step.backend is not None:
        step.backend.attend(step.of_backend, layer, grouped, rule, window, out)
        step.on_layer()
        return out.flatten(1, 2).unsqueeze(0), None
    if step.num_decodes:
        decodes = step.decodes(window)
        _attend_decodes(step, layer, decodes, grouped[: step.num_decodes], rule, out)
    for chunk in step.prefills(window):
        _attend_prefill(step, layer, chunk, grouped, (key[0], value[0]), rule, out)
    step.on_layer()
    return out.flatten(1, 2).unsqueeze(0), None


def _write(step: StepContext, layer: int, key: Tensor, value: Tensor) -> None:
    if step.backend is not None:
        step.backend.write(step.of_backend, layer, step.slots, key, value)
        return
    step.store.write(layer, step.slots, key, value)
    if step.compressions is not None:
        step.store.compress_layer(layer, *step.compressions)


def _attend_decodes(
    step: StepContext, layer: int, batch: DecodeBatch, query: Tensor, rule: ScoreRule, out: Tensor
) -> None:
    """Fills rows [0, D) of `out` [T, kv heads, group, d] from `query` [D, kv heads, group, d]."""
    ordered = query if batch.order is None else query.index_select(0, batch.order)
    parts = []
    for bucket in batch.buckets:
        rows = bucket.stop - bucket.start
        keys, values = step.store.gather(layer, bucket.blocks, rows)
        parts.append(attend_decodes(ordered[bucket.start : bucket.stop], keys, values, bucket.mask, rule))
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    if batch.order is None:
        out[: step.num_decodes] = attended
    else:
        out.index_copy_(0, batch.order, attended)


def _attend_prefill(
    step: StepContext,
    layer: int,
    chunk: PrefillChunk,
    query: Tensor,
    fresh: tuple[Tensor, Tensor],
    rule: ScoreRule,
    out: Tensor,
) -> None:
    """Fills the chunk's rows of `out` [T, kv heads, group, d]; `fresh` are this step's [kv heads, T, d]."""
    rows = slice(chunk.start, chunk.stop)
    queries = query[rows].permute(1, 2, 0, 3)
    if chunk.blocks is None:
        keys, values = fresh[0][:, rows], fresh[1][:, rows]
    else:
        keys, values = (part[0] for part in step.store.gather(layer, chunk.blocks, 1))
    attended = attend_prefill(queries, keys, values, chunk.mask, rule)
    out[rows] = attended.permute(2, 0, 1, 3)


def _refuse_unsupported(mask: Tensor | None, same_width: bool, others: dict[str, Any]) -> None:
    unsupported = [name for name, value in others.items() if _changes_result(name, value)]
    if mask is not None:
        unsupported.append("attention_mask")
    if not same_width:
        unsupported.append("keys and values of different width")
    if unsupported:
        raise ModelLoadError(
            f"The model's attention asks for {', '.join(unsupported)}, which is not supported; "
            "choose a model with plain attention."
        )


def _changes_result(name: str, value: object) -> bool:
    """Whether an argument that attention would ignore carries something that its result depends on."""
    if name == "is_causal":
        return value is False
    return isinstance(value, Tensor) and name not in _HARMLESS
