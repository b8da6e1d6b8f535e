"""A step plan as the tensors that attention needs, made once per step and shared by all layers.

Decodes are gathered in buckets of similar length, so that padding stays small and a bucket's keys
and values stay in the processor's cache:

    lengths in blocks   9 9 8 | 3 3 2 2      two buckets, padded to 9 and to 3

Layers differ at most in how far back a token sees (a sliding window, chunks), so what depends on it is made once
for each such reach.

`ScoreRule`: what a model does with its scores; `attend_decodes` and `attend_prefill` attend over dense keys and values.

    scores = soft cap(scale * q . k) + mask + bias      bias: linear in the key's position (ALiBi)
    weights = softmax([scores | sink])                  a sink takes weight and gives no value

Where a model has neither caps nor sinks this is `scaled_dot_product_attention`; otherwise plain
matrix products with the scores in float32.
Sources: Press et al., "ALiBi", https://arxiv.org/abs/2108.12409; Gemma Team, "Gemma 2",
https://arxiv.org/abs/2408.00118; OpenAI, "gpt-oss model card", https://arxiv.org/abs/2508.10925.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.executor.core.sparse_attention import FIELDS, SparsePattern
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.kv_cache.store import KvStore


@dataclass(frozen=True)
class Chunks:
    """A token sees its own chunk of the text alone, up to itself: positions [n * size, (n + 1) * size)."""

    size: int


# How far back a token sees: so many tokens, itself included; its chunk; or everything.
Reach = int | Chunks | None


def oldest_seen(reach: Reach, position: Any) -> Any:
    """The oldest position that a token at `position` (or each of many) sees."""
    if reach is None:
        return np.zeros_like(position)
    if isinstance(reach, Chunks):
        return position // reach.size * reach.size
    return np.maximum(position - reach + 1, 0)


# int64 [K] key positions -> float [kv heads, group, K], what is added to scores that are scaled already.
KeyBias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ScoreRule:
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [kv heads, group]
    key_bias: KeyBias | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def of_heads(self, heads: slice) -> "ScoreRule":
        """That of some of the KV heads."""
        bias, sinks = self.key_bias, self.sinks
        own_bias = None if bias is None else (lambda keys: bias(keys)[heads])
        return replace(self, sinks=None if sinks is None else sinks[heads], key_bias=own_bias)


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
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: ScoreRule, positions: Tensor | None = None
) -> Tensor:
    """A chunk of one sequence. Returns [kv heads, group, rows, d].

    `queries` [kv heads, group, rows, d], `keys` and `values` [kv heads, K, d], `mask` [rows, K] or None for
    a chunk that starts its sequence (then K = rows and attention is causal). `positions` as of `PrefillChunk`.
    """
    group = queries.shape[1]
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    if mask is None and not (rule.is_plain and rule.key_bias is None):
        mask = causal(queries.shape[-2], queries.device, queries.dtype)
    if rule.key_bias is not None and mask is not None:
        mask = mask + _bias(rule.key_bias, mask, positions).unsqueeze(-2)
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


def _bias(key_bias: KeyBias, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """`positions`: of the keys; None: they follow each other."""
    # Models with linear biases have no sliding window, so the first key is the sequence's first token.
    keys = torch.arange(mask.shape[-1], device=mask.device) if positions is None else positions
    return key_bias(keys).to(mask.dtype)


def causal(rows: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The mask [rows, rows] of a chunk that starts its sequence."""
    return torch.full((rows, rows), float("-inf"), dtype=dtype, device=device).triu(1)


_CPU_GATHER_BYTES = 4 << 20  # keys and values gathered at once on a CPU: about what its caches hold
_GPU_GATHER_BYTES = 256 << 20
_PADDING = 0.75  # a sequence joins a bucket when it is at least this share of the bucket's longest

Int64Array = NDArray[np.int64]
Made = TypeVar("Made")


class AttentionBackend(Protocol):
    """What attends over a rank's KV store in place of PyTorch's operators. One per rank; steps come one after another.

    Tensors lie on the store's device: T rows of the step, `kv heads` of this rank, `group` query heads to each.
    """

    def begin(self, plan: StepPlan) -> Any:
        """What it needs of a step, made once for all layers: what the other calls get as `step`."""
        ...

    def write(self, step: Any, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value` [T, kv heads, d] at `slots` int64 [T], then compresses what the step compresses, and
        keeps the summaries of the blocks that it fills where the store has room for any."""
        ...

    def attend(
        self,
        step: Any,
        layer: int,
        query: Tensor,
        rule: ScoreRule,
        window: int | None,
        out: Tensor,
        choosing: int | None = None,
    ) -> None:
        """Fills `out` from `query`, both [T, kv heads, group, d]; the step's keys have been written. `window`: tokens
        that a row sees back, itself included; None: all. `choosing`: the number of the layer, of which rows may read
        some blocks only, as the plan says (`core/sparse_attention.py`); None: they read everything."""
        ...


@dataclass(frozen=True)
class DecodeBucket:
    """Decodes that attend together: rows [start, stop) of the ordered decodes."""

    start: int
    stop: int
    blocks: Tensor  # int64 [n * B]: their block tables, padded
    mask: Tensor  # model dtype [n, 1, 1, B * block size]: 0 where a token attends, -inf elsewhere


@dataclass(frozen=True)
class DecodeBatch:
    """All decodes of a step for one window."""

    # int64 [D]: rows of the flat batch in bucket order; None where that is their own order.
    order: Tensor | None
    buckets: list[DecodeBucket]

    def rows_of(self, bucket: DecodeBucket, device: torch.device) -> Tensor:
        """int64: the rows of the flat batch that are in `bucket`."""
        rows = torch.arange(bucket.start, bucket.stop, device=device)
        return rows if self.order is None else self.order[rows]


@dataclass(frozen=True)
class PrefillChunk:
    """One sequence's rows [start, stop) of the flat batch."""

    start: int
    stop: int
    # int64 [B]: its block table from the first block in the window, then those blocks of its own that it fills, as
    # they are written; None when the chunk is all it needs.
    blocks: Tensor | None
    # model dtype [rows, keys]: 0 where a token attends, -inf elsewhere; None for plain causal attention.
    mask: Tensor | None
    # int64 [keys]: of the keys, where some are there twice; None: they follow each other from the first one read.
    positions: Tensor | None = None

    def key_positions(self, device: torch.device) -> Tensor:
        """int64 [keys]: `positions`, or those that follow each other."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.stop - self.start if self.mask is None else self.mask.shape[1], device=device)


@dataclass(frozen=True)
class BlockChoice:
    """The keys that rows attend to."""

    decodes: list[Tensor]  # bool [n, kv heads, K] of each bucket
    # Of each chunk bool [kv heads, rows, blocks], and int64 [K]: the block of each key
    prefills: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RecurrentPiece:
    """Rows [start, stop) of the flat batch of one sequence, whose state is in `slot`."""

    start: int
    stop: int
    slot: int
    fresh: bool  # whether the sequence begins here, with zeros for its state
    copies: tuple[int, ...]  # slots that the state behind the last row goes to as well


@dataclass(frozen=True)
class RecurrentBatch:
    """A step as layers with recurrent state see it: all decodes at once, then each chunk for itself."""

    slots: Tensor  # int64 [D]: of the decodes
    fresh: Tensor  # bool [D]: decodes that begin a sequence
    copies: list[tuple[int, int]]  # (from, to): slots of decodes that go to other ones as well
    pieces: list[RecurrentPiece]


class StepContext:
    """What attention needs to know of a step. Reaches it as the keyword argument `step`."""

    def __init__(
        self, plan: StepPlan, store: KvStore, on_layer: Callable[[], None], backend: AttentionBackend | None = None
    ):
        """`backend` attends in place of PyTorch where there is one."""
        self.store = store
        self.backend = backend
        self.of_backend: Any = None if backend is None else backend.begin(plan)
        self.on_layer = on_layer  # called once per layer, as a sign of progress
        # Told of the rows [start, stop) that modules are called with, where it is not all of the step's.
        self.narrow: Callable[[int, int], None] = lambda start, stop: None
        # Tokens at positions before it are seen by themselves alone; to be set before anybody attends.
        self.first_seen = 0
        self.num_decodes = plan.num_decodes
        self.slots = self.to_device(as_int32(plan.slots))  # int64 [T]
        self._slots = as_int32(plan.slots)
        self._query_lens: Int64Array = as_int32(plan.query_lens).astype(np.int64)
        self._context_lens: Int64Array = as_int32(plan.context_lens).astype(np.int64)
        self._tables = as_int32(plan.block_tables)
        blocks = -(-self._context_lens // store.block_size)
        self._table_starts: Int64Array = np.cumsum(blocks) - blocks
        choices = as_int32(plan.sparse).reshape(-1, FIELDS).tolist()
        self._choices = [SparsePattern(*choice) for choice in choices]
        self._plan = plan
        self._decodes: dict[Reach, DecodeBatch] = {}
        self._prefills: dict[Reach, list[PrefillChunk]] = {}
        self._made: dict[Hashable, Any] = {}

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]"""
        return self.to_device(as_int32(self._plan.positions))

    @property
    def positions_on_host(self) -> Int64Array:
        """int64 [T]"""
        return as_int32(self._plan.positions).astype(np.int64)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` makes, made once per step for all layers that ask for `key`."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    @cached_property
    def compressions(self) -> tuple[Tensor, Tensor] | None:
        """(writable, quantized) int64 [C] each: the blocks that the step fills; a backend has them its own way."""
        pairs = as_int32(self._plan.compressions).reshape(-1, 2)
        return (self.to_device(pairs[:, 0]), self.to_device(pairs[:, 1])) if len(pairs) else None

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor]:
        """(as they are written, as they are kept) int64 [C] each: the blocks that the step fills; the same ids where
        nothing is compressed."""
        if self.compressions is not None:
            return self.compressions
        size = self.store.block_size
        last = self.positions_on_host % size == size - 1
        blocks = self.to_device(self._slots[last] // size if not self.store.num_quantized else self._slots[:0])
        return blocks, blocks

    def choice_of(self, sequence: int) -> SparsePattern:
        """What the tokens of the step's `sequence`-th sequence read."""
        return self._choices[sequence] if self._choices else SparsePattern.of(None)

    def chooses(self, page: int, layer: int) -> bool:
        """Whether some row may not read everything in layer `layer`, whose page layer is `page`."""
        own = page in self.store.shape.choosing
        return own and any(choice.kind and choice.dense_layers <= layer for choice in self._choices)

    def table_of(self, sequence: int) -> Tensor:
        """int64: the block table of the step's `sequence`-th sequence."""
        first = self._table_starts[sequence]
        blocks = -(-self._context_lens[sequence] // self.store.block_size)
        return self.to_device(self._tables[first : first + blocks])

    def decodes(self, reach: Reach) -> DecodeBatch:
        """The decodes, for layers that see as far back as `reach`."""
        if reach not in self._decodes:
            self._decodes[reach] = self._decode_batch(reach)
        return self._decodes[reach]

    def prefills(self, reach: Reach) -> list[PrefillChunk]:
        """The prefill chunks, for layers that see as far back as `reach`."""
        if reach not in self._prefills:
            rows = np.cumsum(self._query_lens)
            self._prefills[reach] = [
                self._prefill_chunk(sequence, int(rows[sequence]), reach)
                for sequence in range(self.num_decodes, len(self._query_lens))
            ]
        return self._prefills[reach]

    @cached_property
    def recurrent(self) -> RecurrentBatch:
        """What layers with recurrent state need to know."""
        slots = as_int32(self._plan.state_slots).tolist()
        fresh = (self._context_lens == self._query_lens).tolist()
        ends = np.cumsum(self._query_lens).tolist()
        wanted: dict[int, list[int]] = {}
        for row, slot in as_int32(self._plan.state_snapshots).reshape(-1, 2).tolist():
            wanted.setdefault(row, []).append(slot)
        count = self.num_decodes
        copies = [(slots[row], slot) for row in range(count) for slot in wanted.get(row, [])]
        pieces = []
        for sequence in range(count, len(slots)):
            start, new = ends[sequence] - int(self._query_lens[sequence]), fresh[sequence]
            stops = sorted({row + 1 for row in wanted if start <= row < ends[sequence]} | {ends[sequence]})
            for stop in stops:
                copied = tuple(wanted.get(stop - 1, ()))
                pieces.append(RecurrentPiece(start, stop, slots[sequence], new, copied))
                start, new = stop, False
        device = self.store.device
        return RecurrentBatch(
            torch.tensor(slots[:count], dtype=torch.int64, device=device),
            torch.tensor(fresh[:count], device=device),
            copies,
            pieces,
        )

    def _decode_batch(self, reach: Reach) -> DecodeBatch:
        size = self.store.block_size
        lengths = self._context_lens[: self.num_decodes]
        oldest: Int64Array = self._oldest_seen(reach, lengths - 1)
        first = oldest // size
        blocks = -(-lengths // size) - first
        order: Int64Array = np.argsort(-blocks, kind="stable")
        buckets = []
        for start, stop in bucket_bounds(blocks[order], self._most_blocks()):
            rows = order[start:stop]
            width = int(blocks[rows[0]])
            # Padding repeats the sequence's last block: its own data, whatever other sequences hold.
            column = np.minimum(np.arange(width), blocks[rows, None] - 1)
            tables = self._tables[self._table_starts[rows, None] + first[rows, None] + column]
            keys = first[rows, None] * size + np.arange(width * size)
            seen = (keys >= oldest[rows, None]) & (keys < lengths[rows, None])
            mask = self._mask(seen)[:, None, None, :]
            buckets.append(DecodeBucket(start, stop, self.to_device(tables.ravel()), mask))
        natural = len(buckets) <= 1 and np.array_equal(order, np.arange(len(order)))
        return DecodeBatch(None if natural else self.to_device(order), buckets)

    def _most_blocks(self) -> int:
        limit = _CPU_GATHER_BYTES if self.store.device.type == "cpu" else _GPU_GATHER_BYTES
        widest = max(pages.values_per_block(self.store.block_size) for pages in self.store.shape.pages)
        return max(1, limit // (widest * self.store.shape.dtype.itemsize))

    def _prefill_chunk(self, sequence: int, stop: int, reach: Reach) -> PrefillChunk:
        """Where the chunk fills a block that its later rows read compressed, both of its forms are among the keys."""
        size = self.store.block_size
        query, context = int(self._query_lens[sequence]), int(self._context_lens[sequence])
        begin, last = context - query, (context - 1) // size
        own = np.arange(begin // size, last) if self.compressions is not None else np.arange(0)
        fresh = begin == 0 and not len(own)
        if fresh and self._oldest_seen(reach, context - 1) == 0:
            return PrefillChunk(stop - query, stop, None, None)
        first = int(self._oldest_seen(reach, begin)) // size
        keys = np.arange(context) if fresh else np.arange(first * size, (last + 1) * size)
        queries = np.arange(begin, context)[:, None]
        seen = keys <= queries
        blocks = None
        if not fresh:
            table = self._tables[self._table_starts[sequence] + np.arange(first, last + 1)]
            written = self._slots[stop - query + np.maximum(own * size - begin, 0)] // size
            blocks = self.to_device(np.concatenate((table, written)))
        if len(own):
            own_keys = (own[:, None] * size + np.arange(size)).ravel()
            at_home = own_keys // size == queries // size
            seen &= (keys // size < queries // size) | (keys // size == last)
            keys, seen = np.concatenate((keys, own_keys)), np.hstack((seen, at_home & (own_keys <= queries)))
        if reach is not None or self.first_seen:
            seen &= keys >= self._oldest_seen(reach, queries)
        return PrefillChunk(stop - query, stop, blocks, self._mask(seen), self.to_device(keys) if len(own) else None)

    def _oldest_seen(self, reach: Reach, position: Any) -> Any:
        return np.maximum(oldest_seen(reach, position), np.minimum(position, self.first_seen))

    def _mask(self, seen: NDArray[np.bool_]) -> Tensor:
        hidden = torch.from_numpy(~seen).to(self.store.device)
        mask = torch.zeros(seen.shape, dtype=self.store.dtype, device=self.store.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def to_device(self, values: NDArray[np.int32] | Int64Array) -> Tensor:
        """The same as int64, where the store is."""
        return torch.from_numpy(values.astype(np.int64)).to(self.store.device)


def bucket_bounds(blocks: Int64Array, most: int) -> list[tuple[int, int]]:
    """[start, stop) of each bucket of sequences whose lengths in `blocks` descend.

    A bucket, padded to its first, holds at most `most` blocks (or a single sequence), and nothing in it
    is shorter than three quarters of its first by more than two blocks.
    """
    bounds: list[tuple[int, int]] = []
    start = 0
    for index in range(1, len(blocks) + 1):
        width = int(blocks[start])
        if index == len(blocks) or (
            (index - start + 1) * width > most or blocks[index] < min(width * _PADDING, width - 2)
        ):
            bounds.append((start, index))
            start = index
    return bounds
