"""Compressed attention (DeepSeek V4): to the last tokens one by one, and to one line for every m tokens.

    token    one line, key and value of all heads at once    the last `sliding_window` of them are in the slot
    line     of m tokens, made when the last of them is there    in KV blocks, in the block of that token
    row      attends to the tokens of the window that ends at it, and to the lines of all m tokens that ended by it

    heavily compressed    m large: a line of its m tokens
    compressed sparse     m small: of them and of the m before; an indexer makes keys of its own in the same way, and
                          chooses `index_topk` of the lines for each row

A line is a mean of what each of its tokens gives, weighted for each channel by a softmax over the tokens' gates. What
the last tokens give is in the slot too, each token in the place of its position modulo the length: nothing is moved
when one comes.

All of this is whole on every rank, so all ranks keep and choose the same; a rank has some query heads, and of the
output's first product their groups. transformers' modules are called for what they hold.
Source: DeepSeek-V4, section 2.3 of its report (huggingface.co/deepseek-ai/DeepSeek-V4-Pro).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.indexing import chosen, scores_of
from services.executor.model.parallel.latent import over_lines
from services.executor.model.parallel.mixers.split import MixerSplit
from services.executor.model.states.base import StatePlace
from services.executor.model.step_context import RecurrentPiece, ScoreRule, StepContext, attend_decodes
from services.executor.model.token_lines import TokenLines, ring_of
from shared.errors import ModelLoadError

_CPU_BYTES = 32 << 20  # scores of the rows of a chunk that attend at once, on a CPU
_GPU_BYTES = 512 << 20


def attend_compressed(attention: Any, place: StatePlace) -> None:
    """Gives transformers' `attention`, split already, a forward over whole steps."""
    attention.forward = CompressedAttention(attention, place.layout, place.slot, place.page).forward


def compressed(config: Any, layout: ShardLayout) -> MixerSplit:
    """Queries and sinks by heads; the output projections: all of the groups in which the rank has heads."""
    groups = _output_groups(config, layout)
    inner = groups.scaled(config.o_lora_rank)
    return MixerSplit(
        outputs={"q_b_proj": (layout.q_heads.scaled(layout.head_dim),)},
        values={"sinks": (layout.q_heads,), "o_a_proj.weight": (inner,)},
        inputs={"o_b_proj": (inner, 0)},
        attributes={"num_heads": layout.q_heads.size, "o_a_proj.n_groups": groups.size},
    )


def _output_groups(config: Any, layout: ShardLayout) -> ShardRange:
    """The groups of heads, each with a first output product of its own, in which this rank has heads.

    Raises `ModelLoadError` where groups would cut a head.
    """
    total, groups = layout.total.q_heads, config.o_groups
    if total % groups:
        raise ModelLoadError(
            f"The model's {total} attention heads do not make the {groups} groups of config.json (o_groups); it is "
            "damaged, fetch the model again."
        )
    each = total // groups
    return ShardRange(layout.q_heads.start // each, -(-layout.q_heads.stop // each))


class CompressedAttention:
    """What computes in place of the forward of transformers' attention module."""

    def __init__(self, module: Any, layout: ShardLayout, slot: int, page: int) -> None:
        self._module, self._slot = module, slot
        self._window: int = module.sliding_window
        groups = _output_groups(module.config, layout)
        each = layout.total.q_heads // module.config.o_groups
        # Heads of this rank's groups that are others', before and behind its own.
        self._around = (layout.q_heads.start - groups.start * each, groups.stop * each - layout.q_heads.stop)
        compressor = module.compressor
        self._lines = None if compressor is None else _Compressor(compressor, "lines", page)
        indexer = getattr(compressor, "indexer", None)
        self._indexer = None if indexer is None else _Indexer(indexer, page + 1)

    def forward(
        self, hidden: Tensor, *, position_embeddings: dict[str, tuple[Tensor, Tensor]], step: StepContext, **others: Any
    ) -> tuple[Tensor, None]:
        """`hidden` [1, T, hidden]; returns the same shape, summed over the ranks."""
        module = self._module
        cos, sin = (part[0].unsqueeze(1) for part in position_embeddings[module.rope_layer_type])
        residual = module.q_a_norm(module.q_a_proj(hidden))
        queries = module.q_b_norm(module.q_b_proj(residual)[0].unflatten(-1, (-1, module.head_dim)))
        tokens = module.kv_norm(module.kv_proj(hidden))[0]
        asked = _Asked(
            _turned(queries, cos, sin), None if self._indexer is None else self._indexer.ask(hidden, residual, step)
        )
        attended = self._attend(step, asked, _turned(tokens.unsqueeze(1), cos, sin)[:, 0], hidden)
        step.on_layer()
        heads = pad(_turned(attended, cos, -sin), (0, 0, *self._around))
        grouped = module.o_a_proj(heads.view(1, len(heads), module.o_a_proj.n_groups, -1))
        return module.o_b_proj(grouped.flatten(2)), None

    def _attend(self, step: StepContext, asked: "_Asked", tokens: Tensor, hidden: Tensor) -> Tensor:
        """[T, heads, d] of `tokens` [T, d], this step's, and of all before them."""
        assert step.store.states is not None, "the store was made with slots"
        states = step.store.states.tensors(self._slot)
        windows = ring_of(step, self._window).keep(states["window"], tokens)
        parts = [part for part in (self._lines, self._indexer) if part is not None]
        made = [part.keep(step, states, hidden) for part in parts]  # first those that are attended to
        out = torch.empty_like(asked.queries)
        rule = ScoreRule(self._module.scaling, sinks=self._module.sinks.view(1, -1))
        if step.num_decodes:
            self._attend_decodes(step, asked, states["window"], rule, out)
        for piece, window in zip(step.recurrent.pieces, windows, strict=True):
            self._attend_piece(step, asked, (piece, window), made, rule, out)
        return out

    def _attend_decodes(self, step: StepContext, asked: "_Asked", window: Tensor, rule: ScoreRule, out: Tensor) -> None:
        batch, slots = step.decodes(None), step.recurrent.slots
        positions = step.positions[: step.num_decodes, None]
        places = torch.arange(self._window, device=window.device)
        hidden = positions < (positions - places) % self._window
        for bucket in batch.buckets:
            own = batch.rows_of(bucket, window.device)
            keys, unseen = window.index_select(0, slots[own]), hidden[own]
            if self._lines is not None:
                lines, behind = self._lines.of_bucket(step, bucket)
                if self._indexer is not None:
                    found, _ = self._indexer.of_bucket(step, bucket)
                    behind = self._indexer.narrowed(asked, own, found.mT, behind)
                keys, unseen = torch.cat((keys, lines), dim=1), torch.cat((unseen, behind), dim=1)
            mask = _mask(unseen, keys.dtype)[:, None, None]
            lines, queries = keys.unsqueeze(1), asked.queries[own].unsqueeze(1)
            out[own] = attend_decodes(queries, lines, lines, mask, rule)[:, 0]

    def _attend_piece(
        self,
        step: StepContext,
        asked: "_Asked",
        piece: tuple[RecurrentPiece, Tensor],
        made: list[Tensor],
        rule: ScoreRule,
        out: Tensor,
    ) -> None:
        """Fills the rows of a piece of a chunk; with it come the tokens that it sees, [window + rows, d]; `made` are
        the lines of this step."""
        (rows, tokens), size = piece, self._window
        begin = int(step.positions_on_host[rows.start])
        lines, keys = tokens[:0], tokens[:0]
        behind = torch.zeros(rows.stop - rows.start, 0, dtype=torch.bool, device=tokens.device)
        if self._lines is not None:
            lines, behind = self._lines.of_rows(step, slice(rows.start, rows.stop), made[0])
        if self._indexer is not None:
            keys, _ = self._indexer.of_rows(step, slice(rows.start, rows.stop), made[1])
        heads = asked.queries.shape[1] * (size + len(lines)) + asked.index_heads * len(keys)
        limit = _CPU_BYTES if tokens.device.type == "cpu" else _GPU_BYTES
        at_once = max(1, limit // (heads * torch.float32.itemsize))
        for first in range(0, rows.stop - rows.start, at_once):
            last = min(first + at_once, rows.stop - rows.start)
            own = torch.arange(rows.start + first, rows.start + last, device=tokens.device)
            unseen = behind[first:last]
            if self._indexer is not None:
                unseen = self._indexer.narrowed(asked, own, keys.mT, unseen)
            near = tokens[first + 1 : last + size]
            back = torch.arange(len(near), device=tokens.device) - torch.arange(
                last - first, device=tokens.device
            ).unsqueeze(1)
            early = torch.arange(first + 1, last + size, device=tokens.device) < size - begin
            mask = _mask(torch.cat(((back < 0) | (back >= size) | early, unseen), dim=1), tokens.dtype)
            out[rows.start + first : rows.start + last] = over_lines(
                asked.queries[own], torch.cat((near, lines)), mask, rule, tokens.shape[1]
            )


@dataclass(frozen=True)
class _Asked:
    """What the rows of a step ask for."""

    queries: Tensor  # [T, heads, d]
    # An indexer's queries [T, its heads, its d], and float32 [T, its heads] what each head counts.
    index: tuple[Tensor, Tensor] | None

    @property
    def index_heads(self) -> int:
        return 0 if self.index is None else self.index[0].shape[1]


class _Compressor(TokenLines):
    """Makes a line of every m tokens, and keeps it in a page layer."""

    def __init__(self, module: Any, name: str, page: int) -> None:
        """`name`: the tensor of the slot with what the last tokens give."""
        windows = module.kv_proj.out_features // module.head_dim
        super().__init__(page, module.compress_rate, module.compress_rate * windows)
        self._module, self._name = module, name

    def keep(self, step: StepContext, states: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """The lines [E, d] that end in this step, once they are stored."""
        given = torch.cat((self._module.kv_proj(hidden), self._module.gate_proj(hidden)), dim=-1)[0]
        return self.store(step, states[self._name], given, self._made)

    def _made(self, given: Tensor, positions: Tensor) -> Tensor:
        """Lines [E, d] of `given` [E, span, values and gates], of m tokens from `positions` int64 [E] on."""
        module, tokens, width = self._module, self.tokens, self._module.head_dim
        values, gates = given.chunk(2, dim=-1)
        bias = module.position_bias
        if self.span > tokens:
            # Each token gives twice: to the line after its own, and to its own. Before the first there is none.
            values = torch.cat((values[:, :tokens, :width], values[:, tokens:, width:]), dim=1)
            before = gates[:, :tokens, :width] + bias[:, :width]
            before = before.masked_fill((positions == 0)[:, None, None], float("-inf"))
            gates = torch.cat((before, gates[:, tokens:, width:] + bias[:, width:]), dim=1)
        else:
            gates = gates + bias
        weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        lines = module.kv_norm((values * weights).sum(dim=1))
        return _turned(lines.unsqueeze(1), *self._waves(lines, positions))[:, 0]

    def _waves(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [E, 1, pairs] at `positions` int64 [E]."""
        module = self._module
        cos, sin = module.rotary_emb(like, position_ids=positions[None], layer_type=module.rope_layer_type)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


class _Indexer(_Compressor):
    """Chooses which lines rows attend to."""

    def __init__(self, module: Any, page: int) -> None:
        super().__init__(module, "keys", page)

    def ask(self, hidden: Tensor, residual: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Queries [T, its heads, its d] and weights float32 [T, its heads]."""
        module = self._module
        queries = module.q_b_proj(residual)[0].unflatten(-1, (-1, module.head_dim))
        weights = module.scorer.weights_proj(hidden)[0].float()
        scale = module.scorer.weights_scaling * module.scorer.softmax_scale
        return _turned(queries, *self._waves(hidden, step.positions)), weights * scale

    def narrowed(self, asked: _Asked, rows: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """bool [R, E]: the lines that are of `hidden` or not chosen, of `keys` [d, E] or [R, d, E]."""
        most: int = self._module.index_topk
        if hidden.shape[1] <= most:
            return hidden
        assert asked.index is not None, "the rows ask the indexer"
        queries, weights = (part[rows] for part in asked.index)
        return hidden | ~chosen(scores_of(queries, weights, keys), hidden, most)


def _turned(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`values` [T, heads, d], of which pairs of the last are turned by `cos` and `sin` [T, 1, pairs]."""
    plain, last = values[..., : -2 * cos.shape[-1]], values[..., -2 * cos.shape[-1] :].float()
    first, second = last[..., 0::2], last[..., 1::2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(values.dtype)), dim=-1)


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
