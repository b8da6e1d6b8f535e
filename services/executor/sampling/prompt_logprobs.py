"""Log probabilities of given tokens, and of the most likely ones, out of logits that lie in shares on the ranks.

    each rank    [Q, its width] ─▶ log-sum-exp, the given token's logit, its K largest      nothing of the width is left
    all ranks    log-sum-exp of all, the logit of the one that has the token                summed, each in its own slot
    each rank    how many of its logits are larger than that                                summed
    rank 0       the K largest of all                                                       gathered

The outcome does not depend on how many ranks there are: of equal logits the smaller token comes first.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.prompt_results import Scores
from services.executor.core.step_plan import Int32Array
from services.executor.sampling.candidates import Few, Floats, exchange, few_of, gather_few

_ROWS = 64
"""Rows of which a copy in float32 is made at a time."""


def score(
    local: Tensor, targets: Int32Array, top: int, collectives: Collectives, widths: Sequence[int]
) -> Scores | None:
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
        return Scores(
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
