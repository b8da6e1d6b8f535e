"""Paged attention in plain PyTorch, reached from transformers' models by name.

Works on any device: blocks are gathered into a dense buffer and handed to
`scaled_dot_product_attention`, or to `step_context.py` where that operator cannot express what the model does.
Query heads that share a KV head are laid out as queries of that head, so keys and values are never repeated.
Values may be narrower than keys, or be a part of them: one line of a latent is both, for all heads.

    decodes   q [n, kv heads, group, d]     one batched call per bucket of similar lengths
    prefill   q [kv heads, group, rows, d]  one call per sequence
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from services.executor.model.sparse_attention import choose, keep_summaries
from services.executor.model.step_context import (
    AttentionBackend,
    Chunks,
    DecodeBatch,
    KeyBias,
    PrefillChunk,
    Reach,
    ScoreRule,
    StepContext,
    attend_decodes,
    attend_prefill,
)
from shared.errors import ModelLoadError

# No mask function goes by this name, so transformers builds no mask; causality is the matter of this file.
ATTENTION_NAME = "ryzanstein_paged"

# Where an attention module that does not pass on how far back it sees has it (`Reach`).
WINDOW_ATTRIBUTE = "window_of_mask"

PAGE_ATTRIBUTE = "page"  # where an attention module whose page layer is not its own index has it

# What an attention module has whose queries are scaled by position: int64 [T] positions -> [T].
SCALES_ATTRIBUTE = "query_scales"

READS_ATTRIBUTE = "reads_only"  # what an attention module has that reads what another layer has stored

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
    block_indices: Any = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stores the step's keys and values, then attends over each sequence's whole context.

    `query` and `key` [1, q heads or kv heads, T, d], `value` [1, kv heads, T, v], all local to this rank; `s_aux`
    [q heads] are attention sinks, `key_bias` makes linear biases, `block_indices` (`chosen_blocks.py`) are the blocks
    that alone are attended to. Returns ([1, T, q heads, v], None).
    Raises `ModelLoadError` when the model asks for what is not supported.
    """
    refuse_unsupported(attention_mask, others)
    scales = module.__dict__.get(SCALES_ATTRIBUTE)
    if scales is not None:
        query = (query * scales(step.positions).view(1, 1, -1, 1)).to(query.dtype)
    kv_heads = key.shape[1]
    rows = query[0].transpose(0, 1)
    tokens, heads, width = rows.shape
    grouped = rows.view(tokens, kv_heads, heads // kv_heads, width)
    sinks = None if s_aux is None else s_aux.view(kv_heads, heads // kv_heads)
    rule = ScoreRule(width**-0.5 if scaling is None else scaling, softcap, sinks, key_bias)
    reach: Reach = module.__dict__.get(WINDOW_ATTRIBUTE) if sliding_window is None else sliding_window
    reads_only = READS_ATTRIBUTE in module.__dict__
    lines = (key[0], value[0])
    page = page_of(module)
    if block_indices is not None:
        keep_lines(step, page, lines)
        out = _attend_to_blocks(step, page, grouped, lines, rule, block_indices)
    else:
        layer: int = module.layer_idx  # type: ignore[assignment]
        choosing = layer if reach is None and not reads_only and step.chooses(page, layer) else None
        how = (rule, reach, value.shape[-1])
        out = attend(step, page, grouped, lines, *how, reads_only=reads_only, choosing=choosing)
    step.on_layer()
    return out.flatten(1, 2).unsqueeze(0), None


def page_of(module: nn.Module) -> int:
    """The page layer that holds what an attention module attends to."""
    layer: int = module.__dict__.get(PAGE_ATTRIBUTE, module.layer_idx)
    return layer


def attend(
    step: StepContext,
    page: int,
    query: Tensor,
    lines: tuple[Tensor, ...],
    rule: ScoreRule,
    reach: Reach,
    value_width: int,
    *,
    reads_only: bool = False,
    choosing: int | None = None,
) -> Tensor:
    """Stores the step's `lines` in page layer `page` and attends: [T, kv heads, group, value width].

    `query` [T, kv heads, group, d]; `lines` [kv heads, T, width] each: keys and values, or one that is both, whose
    first `value_width` values are the value. `reads_only`: another layer of the step has stored them. `choosing`: as of
    `AttentionBackend`.
    """
    out = torch.empty((*query.shape[:-1], value_width), dtype=query.dtype, device=query.device)
    backend = step.backend
    if len(lines) == 1 or lines[0].shape[-1] != value_width or isinstance(reach, Chunks):
        backend = None
    if choosing is not None and rule.key_bias is not None:
        backend = None  # it counts keys among those that are read, and biases go by positions
    if not reads_only:
        keep_lines(step, page, lines, backend)
    if backend is not None and not isinstance(reach, Chunks):
        backend.attend(step.of_backend, page, query, rule, reach, out, choosing)
        return out
    if choosing is not None:
        return _attend_to_blocks(step, page, query, lines, rule, choose(step, page, choosing, query))
    if step.num_decodes:
        attend_all_decodes(step, page, step.decodes(reach), query[: step.num_decodes], rule, out)
    for chunk in step.prefills(reach):
        _attend_prefill(step, page, chunk, query, lines, rule, out)
    return out


def _attend_to_blocks(
    step: StepContext, page: int, query: Tensor, lines: tuple[Tensor, ...], rule: ScoreRule, choice: Any
) -> Tensor:
    """As `attend`, of keys of chosen blocks, once the step's are stored: `choice` is a `BlockChoice`."""
    out = torch.empty((*query.shape[:-1], lines[1].shape[-1]), dtype=query.dtype, device=query.device)
    if step.num_decodes:
        batch = step.decodes(None)
        attend_all_decodes(step, page, batch, query[: step.num_decodes], rule, out, choice.decodes)
    for chunk, (chosen, blocks) in zip(step.prefills(None), choice.prefills, strict=True):
        rows = slice(chunk.start, chunk.stop)
        found = lines_of(step, page, chunk, lines)
        keys, values = _keys_and_values(found, query.shape[-1], out.shape[-1])
        for head in range(query.shape[1]):
            seen = chosen[head][:, blocks]
            seen = seen.tril() if chunk.mask is None else seen & (chunk.mask == 0)
            mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
            own = slice(head, head + 1)
            queries = query[rows, own].permute(1, 2, 0, 3)
            of_head = rule.of_heads(own)
            attended = attend_prefill(queries, keys[own], values[own], mask, of_head, chunk.positions)
            out[rows, own] = attended.permute(2, 0, 1, 3)
    return out


def keep_lines(
    step: StepContext,
    page: int,
    lines: tuple[Tensor, ...],
    backend: AttentionBackend | None = None,
    slots: Tensor | None = None,
) -> None:
    """Stores the step's `lines` [heads, T, width] each in page layer `page`, and compresses what they fill; at `slots`
    int64 [T] where not every token of the step has a line."""
    rows = [line.transpose(0, 1) for line in lines]
    if backend is not None:
        backend.write(step.of_backend, page, step.slots, *rows)
        return
    step.store.write(page, step.slots if slots is None else slots, *rows)
    if step.compressions is not None:
        step.store.compress_layer(page, *step.compressions)
    keep_summaries(step, page)


def attend_all_decodes(
    step: StepContext,
    page: int,
    batch: DecodeBatch,
    query: Tensor,
    rule: ScoreRule,
    out: Tensor,
    chosen: Sequence[Tensor | None] | None = None,
) -> None:
    """Fills rows [0, D) of `out` [T, kv heads, group, v] from `query` [D, kv heads, group, d].

    `chosen`, of each bucket: bool [n, K] or [n, kv heads, K], the keys that alone are attended to; None: all.
    """
    ordered = query if batch.order is None else query.index_select(0, batch.order)
    parts = []
    for index, bucket in enumerate(batch.buckets):
        rows = bucket.stop - bucket.start
        keys, values = _keys_and_values(step.store.gather(page, bucket.blocks, rows), query.shape[-1], out.shape[-1])
        mask = bucket.mask
        if chosen is not None and (keep := chosen[index]) is not None:
            mask = mask.masked_fill(~keep.view(rows, -1, 1, keep.shape[-1]), float("-inf"))
        parts.append(attend_decodes(ordered[bucket.start : bucket.stop], keys, values, mask, rule))
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    if batch.order is None:
        out[: step.num_decodes] = attended
    else:
        out.index_copy_(0, batch.order, attended)


def _attend_prefill(
    step: StepContext,
    page: int,
    chunk: PrefillChunk,
    query: Tensor,
    fresh: tuple[Tensor, ...],
    rule: ScoreRule,
    out: Tensor,
) -> None:
    """Fills the chunk's rows of `out` [T, kv heads, group, v]; `fresh` as of `lines_of`."""
    rows = slice(chunk.start, chunk.stop)
    queries = query[rows].permute(1, 2, 0, 3)
    lines = lines_of(step, page, chunk, fresh)
    keys, values = _keys_and_values(lines, query.shape[-1], out.shape[-1])
    attended = attend_prefill(queries, keys, values, chunk.mask, rule, chunk.positions)
    out[rows] = attended.permute(2, 0, 1, 3)


def lines_of(step: StepContext, page: int, chunk: PrefillChunk, fresh: tuple[Tensor, ...]) -> Any:
    """What a chunk attends to, [heads, K, width] of each part; `fresh` are this step's lines [heads, T, width]."""
    if chunk.blocks is None:
        return [line[:, chunk.start : chunk.stop] for line in fresh]
    return step.store.gather(page, chunk.blocks, 1)[:, 0]


def _keys_and_values(lines: Any, key_width: int, value_width: int) -> tuple[Tensor, Tensor]:
    """Of two parts, or of one that is both."""
    return lines[0][..., :key_width], lines[-1][..., :value_width]


def refuse_unsupported(mask: Tensor | None, others: dict[str, Any]) -> None:
    unsupported = [name for name, value in others.items() if _changes_result(name, value)]
    if mask is not None:
        unsupported.append("attention_mask")
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
