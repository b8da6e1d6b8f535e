"""Indexed attention (DSA): a small indexer chooses for each row the tokens that all heads attend to.

    score of a token    sum over the indexer's heads of weight · relu(query · key)     key: one for all heads
    chosen              the `index_topk` of the highest scores, of those that tie the earliest

The indexer keeps its key of each token in a page layer of its own, after the token's latent line. It is replicated on
all ranks, so that they choose the same: split, it would cost an all-reduce per layer of as many values as the context
has tokens. Where a text has no more tokens than are chosen, all are: attention is dense, and nothing is scored.

transformers' modules are called as they are; in place of indices, an `IndexerMasks` goes from indexer to attention, and
on to the layers that have no indexer of their own. Source: DeepSeek-V3.2-Exp, section 2.1 of its report,
https://github.com/deepseek-ai/DeepSeek-V3.2-Exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from services.executor.families.family import ModelFamily
from services.executor.families.registry import family_of
from services.executor.model.attention import keep_lines, lines_of
from services.executor.model.states.base import StatePlace
from services.executor.model.step_context import PrefillChunk, StepContext

_CPU_BYTES = 32 << 20  # scores of all heads of the rows that are scored at once, on a CPU
_GPU_BYTES = 512 << 20


@dataclass(frozen=True)
class IndexerMasks:
    """The keys that rows attend to, as bool masks; None: all they see."""

    decodes: list[Tensor | None]  # of each bucket: [n, K]
    prefills: list[Tensor | None]  # of each chunk: [rows, K]


def choose_tokens(attention: Any, place: StatePlace) -> None:
    """Has `attention`'s indexer, where it has one, keep its keys in the page layer after the line's, and make an
    `IndexerMasks`."""
    if getattr(attention, "indexer", None) is None:
        return
    indexer = _Indexer(attention.indexer, family_of(place.config.model_type), place.page + 1)
    attention.register_forward_pre_hook(indexer.begin, with_kwargs=True)
    attention.indexer.forward = indexer.choose


class _Indexer:
    """What computes in place of the forward of transformers' module."""

    def __init__(self, module: Any, family: ModelFamily, page: int) -> None:
        self._module, self._page = module, page
        interleaved = family.indexer_interleaved
        self._rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
        self._rotated_last = family.indexer_rotates_last
        self._step: StepContext | None = None

    def begin(
        self, attention: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What comes with a step: the module does not hand it on, and hands on a mask, which nobody reads."""
        self._step = named["step"]
        return arguments, {**named, "attention_mask": torch.empty(1, 1, 1, 1)}

    def choose(
        self,
        hidden: Tensor,
        residual: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
    ) -> IndexerMasks:
        """`hidden` [1, T, hidden], `residual` [1, T, rank]: what queries are made of."""
        step, module = self._step, self._module
        assert step is not None, "an indexer is called by its attention"
        queries = module.wq_b(residual).unflatten(-1, (-1, module.head_dim))
        keys = module.k_norm(module.wk(hidden).to(module.k_norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
        queries, keys = self._rotated(queries, keys, position_embeddings)
        line = keys[0].transpose(0, 1).to(hidden.dtype)
        keep_lines(step, self._page, (line,))
        weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float()[0]
        weights *= module.n_heads**-0.5 * module.softmax_scale
        return IndexerMasks(
            self._of_decodes(step, queries[0], weights),
            [self._of_chunk(step, chunk, queries[0], weights, line) for chunk in step.prefills(None)],
        )

    def _rotated(
        self, queries: Tensor, keys: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """[1, T, heads, d] and [1, T, 1, d], turned by their positions."""
        turned = self._module.qk_rope_head_dim
        plain = self._module.head_dim - turned
        widths, at = ((plain, turned), 1) if self._rotated_last else ((turned, plain), 0)
        parts = [list(torch.split_with_sizes(both, widths, dim=-1)) for both in (queries, keys)]
        cos, sin = position_embeddings
        parts[0][at], parts[1][at] = self._rotate(parts[0][at], parts[1][at], cos, sin, unsqueeze_dim=2)
        return torch.cat(parts[0], dim=-1), torch.cat(parts[1], dim=-1)

    def _of_decodes(self, step: StepContext, queries: Tensor, weights: Tensor) -> list[Tensor | None]:
        batch = step.decodes(None)
        made: list[Tensor | None] = []
        for bucket in batch.buckets:
            hidden = bucket.mask[:, 0, 0] != 0
            if hidden.shape[1] <= self._module.index_topk:
                made.append(None)
                continue
            own = batch.rows_of(bucket, queries.device)
            keys = step.store.gather(self._page, bucket.blocks, len(own))[0, :, 0]
            scores = scores_of(queries[own], weights[own], keys.mT)
            made.append(chosen(scores, hidden, self._module.index_topk))
        return made

    def _of_chunk(
        self, step: StepContext, chunk: PrefillChunk, queries: Tensor, weights: Tensor, line: Tensor
    ) -> Tensor | None:
        keys = lines_of(step, self._page, chunk, (line,))[0][0]
        count, most = keys.shape[0], self._module.index_topk
        if count <= most:
            return None
        if chunk.mask is None:
            hidden = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
        else:
            hidden = chunk.mask != 0
        parts = []
        for rows in _pieces(chunk.stop - chunk.start, queries.shape[1] * count, keys.device):
            own = slice(chunk.start + rows.start, chunk.start + rows.stop)
            parts.append(chosen(scores_of(queries[own], weights[own], keys.mT), hidden[rows], most))
        return torch.cat(parts)


def _pieces(rows: int, scores: int, device: torch.device) -> Iterator[slice]:
    """Rows that are scored at once, each with `scores` values, so that memory is bounded whatever the context is."""
    limit = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    step = max(1, limit // (scores * torch.float32.itemsize))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def scores_of(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """float32 [R, K] of `queries` [R, heads, d], `weights` float32 [R, heads] and `keys` [d, K] or [R, d, K]."""
    of_heads = torch.relu_(torch.matmul(queries.float(), keys.float()))
    return torch.matmul(weights.unsqueeze(1), of_heads).squeeze(1)


def chosen(scores: Tensor, hidden: Tensor, count: int) -> Tensor:
    """bool [R, K]: of each row the `count` highest of `scores` [R, K], those of `hidden` after all others. Ties
    go to the earlier."""
    seen = scores.masked_fill(hidden, float("-inf"))
    least = torch.topk(seen, count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, ties = seen > least, seen == least
    room = count - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))
