"""What of a step's logits goes to the sampler: for each row as much as its parameters need, and no more.

Every rank has the logits of its span of the vocabulary. Which rows need what comes with the plan
(`StepPlan.candidates`), so that all ranks send the same amounts:

    all rows    largest logit, its token, log-sum-exp         summed over the ranks, each in its own slot
    top-k       the k largest of each rank                    gathered, and cut to the k largest of all
    top-p       tokens near the largest, weight of all        gathered, and summed
    the others  the whole row                                 gathered

The k largest of the vocabulary are among the k largest of every span. Tokens that tie with the last one are
all kept, in both steps, so the outcome does not depend on how many ranks there are.

`score`: log probabilities of a prompt's tokens, and of the most likely ones.

    each rank    [Q, its width] ─▶ log-sum-exp, the given token's logit, its K largest      nothing of the width is left
    all ranks    log-sum-exp of all, the logit of the one that has the token                summed, each in its own slot
    each rank    how many of its logits are larger than that                                summed
    rank 0       the K largest of all                                                       gathered

Of equal logits the smaller token comes first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.collectives.base import Collectives, of_all_ranks
from services.executor.core.prompt_results import PromptTokenScores
from services.executor.core.sampling_state import Mask
from services.executor.core.step_plan import Int32Array

MOST_CANDIDATES = 1024  # rows whose top-k is wider are gathered whole
# More than asked for are looked at, to see the ties at the end; a whole scan only where these are not enough.
_MARGIN = 16

_FEW_ROWS = 8  # a row of 49,152 logits is worth a tenth of a millisecond of one thread

# What a row needs: its `count` largest logits, negative where the log-sum-exp of all is needed too. With
# count 0: those less than `margin` below the largest, and the sum of exp((logit - largest) / temperature) over
# all, of which fewer will do that have the `share` of that sum; without a margin: the whole row.
WANT = np.dtype([("count", "<i4"), ("temperature", "<f4"), ("margin", "<f4"), ("share", "<f4")])

Wants = NDArray[np.void]
Int64Array = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RowTable:
    """Logits of some rows of a step: of the whole vocabulary, or of candidates."""

    rows: list[int]
    # [n, C] by ascending token: all, in the model's data type on its device; or candidates, float32 on the
    # CPU, then minus infinity.
    scores: Tensor
    # int64 [n, C]: the columns' tokens, the vocabulary's size where there is none; None: column c is token c.
    ids: Int64Array | None = None
    # float64 [n, 1]: the weight of the whole vocabulary (see `WANT`); None: the scores are all that counts.
    totals: Tensor | None = None

    def take(self, chosen: list[int]) -> "RowTable":
        """A copy of the rows at these indices, in float32."""
        where = torch.tensor(chosen, device=self.scores.device)
        rows = [self.rows[at] for at in chosen]
        ids = None if self.ids is None else self.ids[chosen]
        totals = None if self.totals is None else self.totals[chosen]
        return RowTable(rows, self.scores.index_select(0, where).float(), ids, totals)

    def token(self, at: int, column: int) -> int:
        return column if self.ids is None else int(self.ids[at, column])

    def columns(self, at: int, tokens: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        """Where `tokens` are in row `at`, and which of them are there at all."""
        if self.ids is None:
            return tokens, np.ones(len(tokens), np.bool_)
        columns = np.searchsorted(self.ids[at], tokens).clip(max=self.ids.shape[1] - 1)
        return columns, self.ids[at, columns] == tokens


class RowChanges(NamedTuple):
    """Changes to some rows of a table of all tokens, handed beside them, so that the rows are not copied."""

    places: Int64Array  # [n, most of a row]: columns whose scores are others; the width where there are no more
    scores: Tensor  # float32, as `places`: what stands there
    allowed: Sequence[Mask | None]  # of each row: which columns may be drawn at all, contiguous; None: all


@dataclass(frozen=True)
class RowLogits:
    """The logits of a step's R sampled rows, as far as the sampler needs them."""

    largest: Floats  # float32 [R]: NaN where a row holds NaN
    # int64 [R]: the token of each row's largest logit; of those that tie, the one with the smallest id.
    tokens: Int64Array
    log_sums: Floats  # float32 [R]: log of the sum of all exponentials, for rows that asked for it
    tables: list[RowTable]  # the rows that need more than their largest logit, each in one table

    @property
    def count(self) -> int:
        return len(self.largest)


class RowSearch(Protocol):
    """Searches rows of logits [R, C], contiguous, whose first column is the token `start`."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(largest values [R], their columns int64 [R], the first of those that tie); NaN is the largest."""
        ...

    def few(self, logits: Tensor, rows: Int64Array, wants: Wants, start: int) -> "Few":
        """Of each of `rows` as many of the largest as `wants` [rows] counts, and all that tie with the last of them."""
        ...

    def log_sums(self, logits: Tensor, rows: Int64Array, largest: Floats) -> Floats:
        """The log of the sum of all exponentials of each of `rows`, whose `largest` are known."""
        ...

    def near(
        self, logits: Tensor, rows: Int64Array, wants: Wants, largest: Floats, start: int, *, alone: bool
    ) -> tuple["Few", NDArray[np.float64]]:
        """The tokens of `rows` whose logits are near each row's `largest` of all ranks, and the weight of all. `alone`:
        there are no other ranks."""
        ...


def largest_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`RowSearch.largest` by PyTorch, without a float32 copy of the logits, which would cost more than the search."""
    if logits.device.type != "cpu" or logits.dtype not in (torch.bfloat16, torch.float32):
        values, tokens = logits.max(dim=-1)
        return values, tokens
    values = logits.amax(dim=-1)  # NaN is the largest
    if logits.dtype is torch.float32:
        return values, torch.from_numpy(logits.numpy().argmax(axis=-1))
    # Positive numbers are in the order of their bits, read as integers, and above all negative ones.
    tokens = torch.from_numpy(logits.view(torch.int16).numpy().argmax(axis=-1))
    for row in (~(values > 0)).nonzero()[:, 0].tolist():
        tokens[row] = logits[row].float().argmax()
    return values, tokens


@contextmanager
def threads_for(rows: int) -> Iterator[None]:
    """Has PyTorch compute so many rows of a vocabulary with one thread where they are few: to wake others takes longer
    than the work, and they are in the way of the model's on the same cores."""
    threads = torch.get_num_threads()
    if rows > _FEW_ROWS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def collect(
    local: Tensor,
    wants: Wants,
    collectives: Collectives,
    widths: Sequence[int],
    search: RowSearch | None = None,
    left_out: Tensor | None = None,
) -> RowLogits | None:
    """`local` [R, this rank's width] of every rank for the sampler, on rank 0; None on the others.

    `wants` [R] of `WANT`. `widths`: each rank's share of the vocabulary. `search`: `TorchRows` unless given.
    `left_out`, int64: columns of `local` that are not among the k largest of rows with a `count`; everything else has
    them. Raises `RingLost`.
    """
    search = search or TorchRows()
    if only_largest(wants):
        return collect_largest(search.largest(local), collectives, widths)
    counts, margins = wants["count"], wants["margin"]
    few = np.flatnonzero((counts != 0) & (counts != 1))
    near = np.flatnonzero((counts == 0) & (margins > 0))
    whole = np.flatnonzero((counts == 0) & (margins <= 0))
    start = sum(widths[: collectives.rank])
    named = local if left_out is None or not len(few) else local.index_fill(1, left_out, -torch.inf)
    best = search.few(named, few, wants[few], start)
    own = _summaries(search.largest(local), start)
    asking = np.flatnonzero(counts < 0)
    if len(asking):
        own[asking, 2] = search.log_sums(local, asking, own[asking, 0])
    own[few, 3] = best.lengths
    summaries = exchange(own, collectives, local.device)
    largest = summaries[:, :, 0]
    tables = []
    if len(few):
        lengths = summaries[:, few, 3].astype(np.int64)
        found = gather_few(best, lengths, collectives, local.device).cut(np.abs(counts[few]))
        tables.append(found.table(few, sum(widths)))
    if len(near):
        tables.append(_near_largest(local, near, wants[near], largest.max(axis=0)[near], collectives, widths, search))
    if len(whole):
        parts = collectives.gather_to_leader(_take(local, whole).contiguous(), widths)
        if parts is not None:
            tables.append(RowTable(whole.tolist(), parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)))
    return None if collectives.rank else _row_logits(summaries, tables)


def only_largest(wants: Wants) -> bool:
    """Whether no row needs more than its largest logit: all are greedy."""
    return bool((wants["count"] == 1).all())


def collect_largest(found: tuple[Tensor, Tensor], collectives: Collectives, widths: Sequence[int]) -> RowLogits | None:
    """`collect` where `only_largest`: `found` is what `Search` finds in this rank's logits."""
    values, tokens = found
    if collectives.world_size == 1:
        none = np.zeros(len(values), np.float32)
        return RowLogits(values.float().cpu().numpy(), tokens.cpu().numpy(), none, [])
    own = _summaries(found, sum(widths[: collectives.rank]))
    summaries = exchange(own, collectives, values.device)
    return None if collectives.rank else _row_logits(summaries, [])


def _row_logits(summaries: Floats, tables: list[RowTable]) -> RowLogits:
    largest = summaries[:, :, 0]
    ranks, rows = largest.argmax(axis=0), np.arange(largest.shape[1])  # NaN is the largest; the first of ties
    with np.errstate(invalid="ignore"):  # rows of infinities, which the sampler refuses
        log_sums = np.logaddexp.reduce(summaries[:, :, 2], axis=0)
    return RowLogits(largest[ranks, rows], summaries[ranks, rows, 1].astype(np.int64), log_sums, tables)


def _near_largest(
    local: Tensor,
    rows: Int64Array,
    wants: Wants,
    largest: Floats,
    collectives: Collectives,
    widths: Sequence[int],
    search: RowSearch,
) -> RowTable:
    """The tokens whose logits are near each row's `largest`, and the weight of all."""
    start, alone = sum(widths[: collectives.rank]), collectives.world_size == 1
    own, totals = search.near(local, rows, wants, largest, start, alone=alone)
    mine = torch.from_numpy(np.stack((own.lengths, totals), axis=-1)).to(local.device)
    every = of_all_ranks(mine, collectives).cpu()
    lengths = every[:, :, 0].numpy().astype(np.int64)
    found = gather_few(own, lengths, collectives, local.device)
    return replace(found.table(rows, sum(widths)), totals=every[:, :, 1].sum(dim=0)[:, None])


# --- on each rank --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Few:
    """Candidates of several rows, end to end: by row, then by token."""

    rows: Int64Array  # int64 [N]: index into the rows that want candidates, ascending
    ids: Int64Array
    values: Floats
    lengths: Int64Array  # int64 [number of rows]: candidates of each

    @classmethod
    def of(cls, rows: Int64Array, ids: Int64Array, values: Floats, count: int) -> "Few":
        order = np.lexsort((ids, rows))
        return cls(rows[order], ids[order], values[order], np.bincount(rows, minlength=count))

    def cut(self, counts: NDArray[np.int32]) -> "Few":
        """Each row's `counts` largest, and what ties with the last of them."""
        falling = -np.sort(-self._padded(0)[1], axis=1)
        thresholds = falling[np.arange(len(counts)), np.minimum(counts, falling.shape[1]) - 1]
        kept = self.values >= thresholds[self.rows]
        return Few.of(self.rows[kept], self.ids[kept], self.values[kept], len(counts))

    def table(self, rows: Int64Array, vocab_size: int) -> RowTable:
        ids, values = self._padded(vocab_size)
        return RowTable(rows.tolist(), torch.from_numpy(values), ids)

    def _padded(self, no_token: int) -> tuple[Int64Array, Floats]:
        """(ids, values), each [rows, most candidates of a row]."""
        shape = (len(self.lengths), max(1, int(self.lengths.max(initial=0))))
        ids, values = np.full(shape, no_token, np.int64), np.full(shape, -np.inf, np.float32)
        starts = np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        columns = np.arange(len(self.rows)) - starts
        ids[self.rows, columns], values[self.rows, columns] = self.ids, self.values
        return ids, values


def _take(local: Tensor, rows: Int64Array) -> Tensor:
    if len(rows) == local.shape[0]:
        return local
    return local.index_select(0, torch.from_numpy(rows).to(local.device))


def few_of(logits: Tensor, counts: NDArray[np.int32], start: int) -> Few:
    """Each row's `counts` largest of this rank's `logits`, and all that tie with the last of them."""
    if not len(counts):
        nothing = np.zeros(0, np.int64)
        return Few(nothing, nothing, np.zeros(0, np.float32), nothing)
    width = logits.shape[1]
    looked_at = min(int(counts.max()) + _MARGIN, width)
    top = logits.topk(looked_at, dim=-1)
    values = top.values.float().cpu().numpy()
    thresholds = values[np.arange(len(counts)), np.minimum(counts, width) - 1]
    kept = values >= thresholds[:, None]
    cut_off = np.flatnonzero(kept[:, -1]) if looked_at < width else np.zeros(0, np.int64)
    kept[cut_off] = False
    rows, columns = np.nonzero(kept)
    ids = top.indices.cpu().numpy()[rows, columns]
    pieces = [(rows, ids, values[rows, columns])]
    for row in cut_off.tolist():
        every = logits[row].float().cpu().numpy()
        tied = np.flatnonzero(every >= thresholds[row])
        pieces.append((np.full(len(tied), row), tied, every[tied]))
    rows, ids, found = (np.concatenate(piece) for piece in zip(*pieces, strict=True))
    return Few.of(rows, ids + start, found, len(counts))


class TorchRows:
    """`RowSearch` by PyTorch."""

    def __init__(self, largest: Callable[[Tensor], tuple[Tensor, Tensor]] = largest_of) -> None:
        self.largest = largest

    def few(self, logits: Tensor, rows: Int64Array, wants: Wants, start: int) -> Few:
        return few_of(_take(logits, rows), np.abs(wants["count"]), start)

    def log_sums(self, logits: Tensor, rows: Int64Array, largest: Floats) -> Floats:
        sums: Floats = _take(logits, rows).float().logsumexp(dim=-1).cpu().numpy()
        return sums

    def near(
        self, local: Tensor, rows: Int64Array, wants: Wants, largest: Floats, start: int, *, alone: bool
    ) -> tuple[Few, NDArray[np.float64]]:
        logits = _take(local, rows).float()
        below = logits - torch.from_numpy(largest)[:, None].to(local.device)
        margins, temperatures = (
            torch.from_numpy(wants[name].copy())[:, None].to(local.device) for name in ("margin", "temperature")
        )
        at, ids = np.nonzero((below >= -margins).cpu().numpy())
        # Weights below exp(-80) add nothing to a sum of at least 1, and denormal ones would cost the most.
        totals = (below / temperatures).clamp_(min=-80).exp_().sum(dim=-1, dtype=torch.float64).cpu().numpy()
        return Few.of(at, ids + start, logits.cpu().numpy()[at, ids], len(rows)), totals


# --- between the ranks ---------------------------------------------------------------------------


def _summaries(found: tuple[Tensor, Tensor], start: int) -> Floats:
    """float32 [R, 4]: this rank's largest logit, its token, log-sum-exp, number of candidates; the last two are
    for others to fill in.

    A token's id is exact in float32: vocabularies have fewer than 2^24 tokens.
    """
    values, tokens = found
    own = np.zeros((len(values), 4), np.float32)
    own[:, 0] = values.float().cpu().numpy()
    own[:, 1] = tokens.cpu().numpy() + start
    return own


def exchange(own: Floats, collectives: Collectives, device: torch.device) -> Floats:
    """`_summaries` of all ranks, float32 [ranks, R, 4]."""
    if collectives.world_size == 1:
        return own[None]
    summaries: Floats = of_all_ranks(torch.from_numpy(own).to(device), collectives).cpu().numpy()
    return summaries


def gather_few(own: Few, lengths: Int64Array, collectives: Collectives, device: torch.device) -> Few:
    """All ranks' candidates on rank 0; `lengths` [ranks, rows]: how many each has. The others keep their own."""
    if collectives.world_size == 1:
        return own
    payload = torch.from_numpy(np.stack((own.ids.astype(np.float32), own.values))).to(device)
    parts = collectives.gather_to_leader(payload, lengths.sum(axis=1).tolist())
    if parts is None:
        return own
    rows = np.concatenate([np.repeat(np.arange(lengths.shape[1]), of_rank) for of_rank in lengths])
    ids, values = torch.cat(parts, dim=-1).cpu().numpy()
    return Few.of(rows, ids.astype(np.int64), values, lengths.shape[1])


_ROWS = 64  # rows of which a copy in float32 is made at a time


def score(
    local: Tensor, targets: Int32Array, top: int, collectives: Collectives, widths: Sequence[int]
) -> PromptTokenScores | None:
    """Of `local` [Q, this rank's width] of every rank, on rank 0; None on the others.

    `targets` [Q]: a token for each row; `top`: the most likely tokens that are wanted of each. `widths`: each rank's
    share of the vocabulary. Raises `RingLost`.
    """
    start, width = sum(widths[: collectives.rank]), local.shape[1]
    columns = torch.from_numpy(targets.astype(np.int64) - start).to(local.device)
    here = (columns >= 0) & (columns < width)
    columns = columns.clamp(0, width - 1)
    largest = few_of(local, np.full(len(local) if top else 0, top, np.int32), start)
    own = np.zeros((len(local), 3), np.float32)
    for rows in _parts(len(local)):
        logits = local[rows].float()
        own[rows, 0] = logits.logsumexp(dim=-1).cpu().numpy()
        chosen = logits.gather(1, columns[rows, None]).squeeze(1)
        own[rows, 1] = chosen.masked_fill_(~here[rows], 0.0).cpu().numpy()
    if top:
        own[:, 2] = largest.lengths
    every = exchange(own, collectives, local.device)
    with np.errstate(invalid="ignore"):  # rows that are no numbers: whoever asks for them is told
        log_sums = np.logaddexp.reduce(every[:, :, 0], axis=0)
        of_targets = every[:, :, 1].sum(axis=0)
    larger = _larger(local, of_targets)
    larger = exchange(larger[:, None], collectives, local.device).sum(axis=0)[:, 0]
    if top:
        largest = gather_few(largest, every[:, :, 2].astype(np.int64), collectives, local.device)
    if collectives.rank:
        return None
    tokens, logits_of = _first(largest, len(local), top)
    log_sums = np.where(np.isfinite(log_sums), log_sums, np.float32(np.nan))
    with np.errstate(invalid="ignore"):
        return PromptTokenScores(
            of_targets - log_sums, larger.astype(np.int32) + 1, tokens, logits_of - log_sums[:, None]
        )


def _parts(count: int) -> list[slice]:
    return [slice(begin, begin + _ROWS) for begin in range(0, count, _ROWS)]


def _larger(local: Tensor, than: Floats) -> Floats:
    """float32 [Q]: how many logits of each row are larger; exact, for vocabularies have fewer than 2^24 tokens."""
    counts = np.zeros(len(local), np.float32)
    bounds = torch.from_numpy(than).to(local.device)[:, None]
    for rows in _parts(len(local)):
        counts[rows] = (local[rows] > bounds[rows]).sum(dim=-1).cpu().numpy()
    return counts


def _first(few: Few, count: int, top: int) -> tuple[Int32Array, Floats]:
    """(tokens int32, logits float32), both [count, top]: each row's largest, the largest first."""
    tokens, values = np.zeros((count, top), np.int32), np.full((count, top), -np.inf, np.float32)
    if not top:
        return tokens, values
    order = np.lexsort((few.ids, -few.values, few.rows))
    rows = few.rows[order]
    lengths = np.bincount(rows, minlength=count)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = places < top
    at = rows[kept], places[kept]
    tokens[at], values[at] = few.ids[order][kept], few.values[order][kept]
    return tokens, values
