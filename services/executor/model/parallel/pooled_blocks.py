"""Attention to chosen blocks of m tokens (Qwen 4), of each of which an indexer keeps one key.

    key of a block      the mean of its tokens' keys, normed, turned by the position of the first
    score               sum over the indexer's heads of relu(query · key)
    a row attends to    the best `block_topk` of the blocks that ended by it, and the tokens since the last that did

The indexer is whole on every rank, so all ranks choose the same blocks, alike for all heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRotaryEmbedding, apply_rotary_pos_emb

from services.executor.model.attention import paged_attention
from services.executor.model.indexing import chosen, scores_of
from services.executor.model.states.base import StatePlace
from services.executor.model.step_context import BlockChoice, PrefillChunk, StepContext
from services.executor.model.token_lines import TokenLines

# Scores of the rows that are scored at once: memory is bounded whatever the context is.
_MOST_BYTES = 32 << 20

Waves = tuple[Tensor, Tensor]  # cos and sin [1, T, d]


def choose_pooled_blocks(attention: Any, place: StatePlace) -> None:
    """Gives transformers' `attention` a forward over whole steps, in which its indexer keeps keys of blocks in the page
    layer after keys and values, and those of tokens in the layer's slots."""
    rotary = Qwen4ExpTextRotaryEmbedding(attention.config)
    indexer = _Indexer(attention.indexer, rotary, place.slot, place.page + 1)

    def forward(hidden: Tensor, position_embeddings: Waves, *, step: StepContext, **others: Any) -> tuple[Tensor, None]:
        """transformers', with a choice of blocks in place of a mask: `hidden` [1, T, hidden]."""
        choice = indexer.choose(step, hidden, position_embeddings)
        heads = (*hidden.shape[:-1], -1, attention.head_dim)
        query, gate = attention.q_proj(hidden).view(*heads[:-1], 2 * attention.head_dim).chunk(2, dim=-1)
        query = attention.q_norm(query).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(hidden).view(heads)).transpose(1, 2)
        value = attention.v_proj(hidden).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attended, _ = paged_attention(
            attention, query, key, value, None, step=step, scaling=attention.scaling, block_indices=choice
        )
        return attention.o_proj((attended * torch.sigmoid(gate)).flatten(2)), None

    attention.forward = forward


class _Indexer:
    """What computes in place of the forward of transformers' module."""

    def __init__(self, module: Any, rotary: Any, slot: int, page: int) -> None:
        self._module, self._rotary, self._slot = module, rotary, slot
        self._tokens: int = module.compress_ratio
        self._lines = TokenLines(page, self._tokens, self._tokens)

    def choose(self, step: StepContext, hidden: Tensor, position_embeddings: Waves) -> BlockChoice:
        """`hidden` [1, T, hidden]"""
        module = self._module
        assert step.store.states is not None, "the store was made with slots"
        both = module.index_qk_proj(hidden)[0].unflatten(-1, (-1, module.index_head_dim))
        queries = module.q_layernorm(both[:, : module.index_n_heads])
        cos, sin = position_embeddings
        queries = apply_rotary_pos_emb(queries, cos=cos[0], sin=sin[0])
        kept = step.store.states.tensors(self._slot)["keys"]
        made = self._lines.store(step, kept, both[:, -1], self._pooled)
        return BlockChoice(
            self._of_decodes(step, queries),
            [self._of_chunk(step, chunk, queries, made) for chunk in step.prefills(None)],
        )

    def _pooled(self, keys: Tensor, positions: Tensor) -> Tensor:
        """One key [E, d] for each block of `keys` [E, m, d] from `positions` int64 [E] on."""
        pooled = self._module.k_layernorm(keys.float().mean(dim=1).to(keys.dtype))
        cos, sin = self._rotary(pooled, positions.view(1, 1, -1))
        turned: Tensor = apply_rotary_pos_emb(pooled.unsqueeze(1), cos=cos[0], sin=sin[0])
        return turned[:, 0]

    def _of_decodes(self, step: StepContext, queries: Tensor) -> list[Tensor]:
        batch, made = step.decodes(None), []
        for bucket in batch.buckets:
            own = batch.rows_of(bucket, queries.device)
            keys, hidden = self._lines.of_bucket(step, bucket)
            blocks = torch.arange(bucket.mask.shape[-1], device=queries.device) // self._tokens
            every = torch.arange(keys.shape[1], device=queries.device)
            count = int(bucket.mask.shape[-1] // self._tokens) + 1
            found = self._chosen(queries[own], keys.mT, hidden, every, count, step.positions[own])
            made.append(found[:, blocks])
        return made

    def _of_chunk(self, step: StepContext, chunk: PrefillChunk, queries: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        rows = slice(chunk.start, chunk.stop)
        keys, hidden = self._lines.of_rows(step, rows, made)
        positions = chunk.key_positions(queries.device)
        ends = positions[(positions + 1) % self._tokens == 0] // self._tokens
        blocks = positions // self._tokens
        count = int(blocks.max()) + 1
        at_once = max(1, _MOST_BYTES // (queries.shape[1] * (len(keys) + 1) * torch.float32.itemsize))
        parts = []
        for first in range(chunk.start, chunk.stop, at_once):
            own = slice(first, min(first + at_once, chunk.stop))
            unseen = hidden[own.start - chunk.start : own.stop - chunk.start]
            parts.append(self._chosen(queries[own], keys.mT, unseen, ends, count, step.positions[own]))
        return torch.cat(parts).unsqueeze(0).expand(self._heads(step), -1, -1), blocks

    def _chosen(
        self, queries: Tensor, keys: Tensor, hidden: Tensor, blocks: Tensor, count: int, positions: Tensor
    ) -> Tensor:
        """bool [R, count]: the blocks that rows at `positions` int64 [R] attend to, of `queries` [R, heads, d], `keys`
        [d, E] or [R, d, E] of `blocks` int64 [E], and `hidden` bool [R, E]."""
        seen = ~hidden
        if hidden.shape[1] > self._module.block_topk:
            weights = torch.full(queries.shape[:2], self._module.index_head_dim**-0.5, device=queries.device)
            seen &= chosen(scores_of(queries, weights, keys), hidden, self._module.block_topk)
        found = torch.zeros(len(queries), count, dtype=torch.int32, device=queries.device)
        found.index_add_(1, blocks, seen.int())
        # Of the block in which a row stands all tokens up to it are seen, unless it ends there.
        own = (positions + 1) // self._tokens
        return (found > 0) | (torch.arange(count, device=queries.device) == own.unsqueeze(1))

    def _heads(self, step: StepContext) -> int:
        """KV heads, which attend to the same."""
        return step.store.shape.pages[self._lines.page - 1].heads
