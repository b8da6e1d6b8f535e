"""What of a step's logits goes to the sampler: for each row as much as its parameters need, and no more.

Every rank has the logits of its span of the vocabulary. Which rows need what comes with the plan
(`StepPlan.candidates`), so that all ranks send the same amounts:

    all rows        largest logit, its token, log-sum-exp     summed over the ranks, each in its own slot
    some rows       the n largest of each rank                gathered, and cut to the n largest of all
    the others      the whole row                             gathered

The n largest of the vocabulary are among the n largest of every span. Tokens that tie with the last one are
all kept, in both steps, so the outcome does not depend on how many ranks there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.model.collectives import Collectives

MOST_CANDIDATES = 1024
"""Rows that need more are gathered whole."""
_MARGIN = 16
"""More than asked for are looked at, to see the ties at the end; a whole scan only where these are not enough."""

Int64Array = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RowLogits:
    """The logits of a step's R sampled rows, as far as the sampler needs them."""

    largest: Floats
    """float32 [R]: NaN where a row holds NaN."""
    tokens: Int64Array
    """int64 [R]: the token of each row's largest logit; of those that tie, the one with the smallest id."""
    log_sums: Floats
    """float32 [R]: log of the sum of all exponentials, for rows that asked for it."""
    few_rows: list[int]
    few: Tensor
    """float32 [len(few_rows), C] on the CPU: these rows' candidates, then minus infinity."""
    few_ids: Int64Array
    """int64 [len(few_rows), C]: their tokens, ascending; the vocabulary's size where there is none."""
    whole_rows: list[int]
    whole: Tensor
    """[len(whole_rows), vocabulary], in the model's data type on its device."""

    @property
    def count(self) -> int:
        return len(self.largest)


def collect(
    local: Tensor, wanted: NDArray[np.int32], collectives: Collectives, widths: Sequence[int]
) -> RowLogits | None:
    """`local` [R, this rank's width] of every rank for the sampler, on rank 0; None on the others.

    `wanted` [R]: the number of candidates of each row, negative where its log-sum-exp is needed too; 0 for
    the whole row. `widths`: each rank's share of the vocabulary. Raises `RingLost`.
    """
    few_rows = np.flatnonzero((wanted != 0) & (wanted != 1))
    whole_rows = np.flatnonzero(wanted == 0)
    counts = np.abs(wanted[few_rows])
    start = sum(widths[: collectives.rank])
    own = _largest_of_rows(local, _take(local, few_rows), counts, start)
    summaries = _exchange_summaries(local, wanted, own.lengths, start, collectives)
    found = own
    if collectives.world_size > 1 and len(few_rows):
        lengths = summaries[:, few_rows, 3].astype(np.int64)
        found = _gather_few(own, lengths, counts, collectives, local.device)
    whole = _take(local, whole_rows)
    if collectives.world_size > 1 and len(whole_rows):
        parts = collectives.gather_to_leader(whole.contiguous(), widths)
        whole = whole if parts is None else torch.cat(parts, dim=-1)
    if collectives.rank:
        return None
    few_ids, few = _padded(found, len(few_rows), sum(widths))
    largest = summaries[:, :, 0]
    ranks, rows = largest.argmax(axis=0), np.arange(local.shape[0])  # NaN is the largest; the first of ties
    with np.errstate(invalid="ignore"):  # rows of infinities, which the sampler refuses
        log_sums = np.logaddexp.reduce(summaries[:, :, 2], axis=0)
    return RowLogits(
        largest=largest[ranks, rows],
        tokens=summaries[ranks, rows, 1].astype(np.int64),
        log_sums=log_sums,
        few_rows=few_rows.tolist(),
        few=torch.from_numpy(few),
        few_ids=few_ids,
        whole_rows=whole_rows.tolist(),
        whole=whole,
    )


# --- on each rank --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Few:
    """Candidates of several rows, end to end: by row, then by token."""

    rows: Int64Array
    """int64 [N]: index into the rows that want candidates, ascending."""
    ids: Int64Array
    values: Floats
    lengths: Int64Array
    """int64 [number of rows]: candidates of each."""

    @classmethod
    def of(cls, rows: Int64Array, ids: Int64Array, values: Floats, count: int) -> "_Few":
        order = np.lexsort((ids, rows))
        return cls(rows[order], ids[order], values[order], np.bincount(rows, minlength=count))


def _take(local: Tensor, rows: Int64Array) -> Tensor:
    if len(rows) == local.shape[0]:
        return local
    return local.index_select(0, torch.from_numpy(rows).to(local.device))


def _largest_of_rows(local: Tensor, logits: Tensor, counts: NDArray[np.int32], start: int) -> _Few:
    """Each row's `counts` largest of this rank's `logits`, and all that tie with the last of them."""
    if not len(counts):
        nothing = np.zeros(0, np.int64)
        return _Few(nothing, nothing, np.zeros(0, np.float32), nothing)
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
    return _Few.of(rows, ids + start, found, len(counts))


def _largest(local: Tensor) -> tuple[Tensor, Tensor]:
    """(values [R], tokens [R]) without a float32 copy of the logits, which would cost more than the search."""
    if local.device.type != "cpu" or local.dtype not in (torch.bfloat16, torch.float32):
        values, tokens = local.max(dim=-1)
        return values, tokens
    values = local.amax(dim=-1)  # NaN is the largest
    if local.dtype is torch.float32:
        return values, torch.from_numpy(local.numpy().argmax(axis=-1))
    # Positive numbers are in the order of their bits, read as integers, and above all negative ones.
    tokens = torch.from_numpy(local.view(torch.int16).numpy().argmax(axis=-1))
    for row in (~(values > 0)).nonzero()[:, 0].tolist():
        tokens[row] = local[row].float().argmax()
    return values, tokens


# --- between the ranks ---------------------------------------------------------------------------


def _exchange_summaries(
    local: Tensor, wanted: NDArray[np.int32], lengths: Int64Array, start: int, collectives: Collectives
) -> Floats:
    """float32 [ranks, R, 4]: each rank's largest logit, its token, log-sum-exp, number of candidates.

    A token's id is exact in float32: vocabularies have fewer than 2^24 tokens.
    """
    values, tokens = _largest(local)
    own = np.zeros((local.shape[0], 4), np.float32)
    own[:, 0] = values.float().cpu().numpy()
    own[:, 1] = tokens.cpu().numpy() + start
    asking = np.flatnonzero(wanted < 0)
    if len(asking):
        own[asking, 2] = _take(local, asking).float().logsumexp(dim=-1).cpu().numpy()
    own[(wanted != 0) & (wanted != 1), 3] = lengths
    if collectives.world_size == 1:
        return own[None]
    slots = torch.zeros((collectives.world_size, *own.shape), device=local.device)
    slots[collectives.rank] = torch.from_numpy(own).to(local.device)
    summaries: Floats = collectives.all_reduce(slots).cpu().numpy()
    return summaries


def _gather_few(
    own: _Few, lengths: Int64Array, counts: NDArray[np.int32], collectives: Collectives, device: torch.device
) -> _Few:
    """All ranks' candidates on rank 0, cut to each row's `counts` largest and what ties with the last.

    `lengths` [ranks, rows]: how many each rank has. The other ranks get back their own.
    """
    payload = torch.from_numpy(np.stack((own.ids.astype(np.float32), own.values))).to(device)
    parts = collectives.gather_to_leader(payload, lengths.sum(axis=1).tolist())
    if parts is None:
        return own
    rows = np.concatenate([np.repeat(np.arange(len(counts)), of_rank) for of_rank in lengths])
    ids, values = torch.cat(parts, dim=-1).cpu().numpy()
    every = _Few.of(rows, ids.astype(np.int64), values, len(counts))
    falling = -np.sort(-_padded(every, len(counts), 0)[1], axis=1)
    thresholds = falling[np.arange(len(counts)), np.minimum(counts, falling.shape[1]) - 1]
    kept = every.values >= thresholds[every.rows]
    return _Few.of(every.rows[kept], every.ids[kept], every.values[kept], len(counts))


def _padded(few: _Few, count: int, no_token: int) -> tuple[Int64Array, Floats]:
    """(ids, values) as tables [count, most candidates of a row]."""
    width = max(1, int(few.lengths.max(initial=0)))
    ids = np.full((count, width), no_token, np.int64)
    values = np.full((count, width), -np.inf, np.float32)
    columns = np.arange(len(few.rows)) - np.repeat(np.cumsum(few.lengths) - few.lengths, few.lengths)
    ids[few.rows, columns], values[few.rows, columns] = few.ids, few.values
    return ids, values
