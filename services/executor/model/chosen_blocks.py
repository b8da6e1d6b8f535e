"""Attention to chosen blocks of keys (MiniMax M3): a small indexer scores keys for each row and KV head.

    score of a key      indexer's query of the head · indexer's key     one key for all heads
    of a block          the highest of its keys that the row sees; the row's own block and those next to it count most
    chosen              the best `index_topk_blocks`: the query heads of the KV head attend to their keys alone

Blocks are of positions, not of the KV cache. The indexer keeps its key of each token in a page layer after the layer's
keys and values; each rank scores for its own KV heads. transformers' modules are called as they are; a `BlockChoice`
goes from indexer to attention in place of indices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from services.executor.model.attention import keep_lines, lines_of
from services.executor.model.parallel.layers import ColumnParallelLinear
from services.executor.model.states.base import StatePlace
from services.executor.model.step_context import BlockChoice, PrefillChunk, StepContext
from shared.errors import ModelLoadError

# Scores of the rows that are scored at once: memory is bounded whatever the context is.
_MOST_BYTES = 32 << 20


def choose_blocks(attention: Any, place: StatePlace) -> None:
    """Has `attention`'s indexer, where it has one, keep its keys in the page layer after keys and values, and make a
    `BlockChoice`; its queries are split.

    Raises `ModelLoadError` where it has not one head for each KV head.
    """
    module, layout = getattr(attention, "indexer", None), place.layout
    if module is None:
        return
    if module.num_heads != layout.total.kv_heads:
        raise ModelLoadError(
            f"The model's indexer has {module.num_heads} heads for {layout.total.kv_heads} KV heads where each needs "
            "one; its config.json is damaged, fetch the model again."
        )
    indexer = _Indexer(module, place.page + 1)
    attention.register_forward_pre_hook(indexer.begin, with_kwargs=True)
    module.forward = indexer.choose
    module.q_proj = ColumnParallelLinear(module.q_proj, layout.kv_heads.scaled(module.head_dim))


class _Indexer:
    """What computes in place of the forward of transformers' module."""

    def __init__(self, module: Any, page: int) -> None:
        self._module, self._page = module, page
        self._step: StepContext | None = None

    def begin(self, attention: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The module does not hand on what comes with a step."""
        self._step = named["step"]

    def choose(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: object, position_ids: Tensor
    ) -> BlockChoice:
        """`hidden` [1, T, hidden]"""
        step, module = self._step, self._module
        assert step is not None, "an indexer is called by its attention"
        queries = module.q_norm(module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
        keys = module.k_norm(module.k_proj(hidden).unsqueeze(2)).transpose(1, 2)
        cos, sin = (part[..., : module.head_dim] for part in position_embeddings)
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        keep_lines(step, self._page, (keys[0],))
        rows = queries[0].transpose(0, 1)  # [T, heads, d]
        return BlockChoice(
            self._of_decodes(step, rows), [self._of_chunk(step, chunk, rows, keys[0]) for chunk in step.prefills(None)]
        )

    def _of_decodes(self, step: StepContext, queries: Tensor) -> list[Tensor]:
        batch, made = step.decodes(None), []
        for bucket in batch.buckets:
            own = batch.rows_of(bucket, queries.device)
            keys = step.store.gather(self._page, bucket.blocks, len(own))[0, :, 0]
            blocks = self._block_of(torch.arange(keys.shape[1], device=keys.device))
            hidden = bucket.mask[:, 0] != 0  # [n, 1, K]
            chosen = self._chosen(queries[own], keys, hidden, blocks, step.positions[own])
            made.append(chosen[..., blocks])
        return made

    def _of_chunk(self, step: StepContext, chunk: PrefillChunk, queries: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
        keys = lines_of(step, self._page, chunk, (line,))[0][0]
        count, positions = keys.shape[0], chunk.key_positions(keys.device)
        blocks = self._block_of(positions)
        rows = max(1, _MOST_BYTES // (queries.shape[1] * count * torch.float32.itemsize))
        parts = []
        for first in range(chunk.start, chunk.stop, rows):
            last = min(first + rows, chunk.stop)
            at = step.positions[first:last]
            if chunk.mask is None:
                hidden = positions > at[:, None]
            else:
                hidden = chunk.mask[first - chunk.start : last - chunk.start] != 0
            parts.append(self._chosen(queries[first:last], keys, hidden[:, None], blocks, at))
        return torch.cat(parts).transpose(0, 1), blocks

    def _block_of(self, positions: Tensor) -> Tensor:
        return positions.div(self._module.block_size, rounding_mode="floor")

    def _chosen(self, queries: Tensor, keys: Tensor, hidden: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """bool [R, heads, blocks] of `queries` [R, heads, d] at `positions` int64 [R], `keys` [K, d] or [R, K, d] of
        `blocks` int64 [K], and `hidden` bool [R, 1, K]."""
        module = self._module
        scores = torch.matmul(queries.float(), keys.float().mT).masked_fill(hidden, float("-inf"))
        count = int(blocks.max()) + 1
        best = scores.new_full((*scores.shape[:2], count), float("-inf"))
        best.scatter_reduce_(2, blocks.expand_as(scores), scores, "amax")
        near = self._block_of(positions)[:, None] - torch.arange(module.local_blocks, device=keys.device)
        near = near.clamp(min=0)[:, None].expand(-1, scores.shape[1], -1)
        best.scatter_(2, near, float("inf"))
        values, indices = best.topk(min(module.topk_blocks, count), dim=-1)
        return torch.zeros_like(best, dtype=torch.bool).scatter_(2, indices, values > float("-inf"))
