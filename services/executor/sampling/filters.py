"""Filters of a distribution over the vocabulary: top-k, top-p and min-p.

Each works in place on `probs` (float32 [rows, vocabulary], not negative, need not sum to 1) and sets
what it drops to 0. A filter is a threshold on the probability, so tokens that tie there are all kept,
and the outcome does not depend on how a device orders ties. Rows whose parameter is off cost nothing.
"""

import torch
from torch import Tensor

_NUCLEUS = 1024
"""Most likely tokens among which a top-p set is sought first; a full sort only where it is wider."""


def keep_top_k(probs: Tensor, top_k: list[int]) -> None:
    """Keeps each row's k most likely tokens; 0, and the vocabulary or more, keep all."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < probs.shape[1]]
    if not rows:
        return
    ranks = [top_k[row] - 1 for row in rows]
    chosen = torch.tensor(rows, device=probs.device)
    largest = probs[chosen].topk(max(ranks) + 1, dim=-1).values
    threshold = largest.gather(1, torch.tensor(ranks, device=probs.device)[:, None])
    _keep_at_least(probs, chosen, threshold)


def keep_top_p(probs: Tensor, top_p: list[float], totals: Tensor | None = None) -> None:
    """Keeps each row's smallest set of most likely tokens whose share of the whole is at least p
    (nucleus sampling, arXiv:1904.09751). The most likely token always stays; 1 keeps all.

    `totals` (float64 [rows, 1]): what the whole is where `probs` are part of it; where they do not reach
    the share, all of them stay."""
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    chosen = torch.tensor(rows, device=probs.device)
    shares = torch.tensor([[top_p[row]] for row in rows], dtype=torch.float64, device=probs.device)
    kept = probs[chosen]
    whole = kept.sum(dim=-1, keepdim=True, dtype=torch.float64) if totals is None else totals[rows]
    _keep_at_least(probs, chosen, _nucleus_threshold(kept, shares * whole))


def keep_min_p(probs: Tensor, min_p: list[float]) -> None:
    """Keeps the tokens at least `min_p` times as likely as the likeliest (arXiv:2407.01082); 0 keeps all."""
    rows = [row for row, p in enumerate(min_p) if p > 0.0]
    if not rows:
        return
    chosen = torch.tensor(rows, device=probs.device)
    shares = torch.tensor([[min_p[row]] for row in rows], dtype=probs.dtype, device=probs.device)
    _keep_at_least(probs, chosen, shares * probs[chosen].amax(dim=-1, keepdim=True))


def _nucleus_threshold(probs: Tensor, targets: Tensor) -> Tensor:
    """Probability [n, 1] of the least likely token in each row's nucleus, whose sum reaches the target [n, 1]."""
    largest = probs.topk(min(_NUCLEUS, probs.shape[1]), dim=-1).values
    threshold, reached = _last_needed(largest, targets)
    wide = (~reached).nonzero()[:, 0]
    if len(wide) and largest.shape[1] < probs.shape[1]:
        threshold[wide], _ = _last_needed(probs[wide].sort(dim=-1, descending=True).values, targets[wide])
    return threshold


def _last_needed(descending: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The value [n, 1] with which the running sum of each row reaches its target, and whether it does [n]."""
    sums = descending.cumsum(dim=-1, dtype=torch.float64)
    before = (sums < targets).sum(dim=-1, keepdim=True)
    last = before.clamp(max=descending.shape[1] - 1)
    return descending.gather(1, last), (before <= last).squeeze(1)


def _keep_at_least(probs: Tensor, rows: Tensor, threshold: Tensor) -> None:
    kept = probs[rows]
    probs[rows] = kept.masked_fill_(kept < threshold, 0.0)
