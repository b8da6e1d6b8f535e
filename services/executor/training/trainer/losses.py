"""What a step makes smaller.

    supervised   - mean over the step's trained tokens of log p(token | what stands before it)
    dpo          - mean over the step's pairs of log sigmoid(margin)
                 margin = beta ((pi_c - ref_c) - (pi_r - ref_r))
                 pi, ref: sums of log probabilities over the trained tokens of the preferred text c and the other one r,
                 by the model and by its base

Each micro batch gives its share of the step's mean, so that gradients of micro batches add up to the step's.
Source of DPO: Rafailov et al., "Direct Preference Optimization", https://arxiv.org/abs/2305.18290, equation 7.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# float64 [3], of some micro batches of a step: its loss, so far; tokens that were the likeliest, of DPO pairs in the
# right order; of DPO, the sum of the margins. On the device: nobody waits for each.
Sums = Tensor


def no_sums(device: torch.device) -> Sums:
    return torch.zeros(3, dtype=torch.float64, device=device)


def supervised(log_probs: Tensor, weights: Tensor, likeliest: Tensor, tokens: int) -> tuple[Tensor, Sums]:
    """The share of a micro batch in the loss of a step with `tokens` trained tokens, and its sums.

    `log_probs`, `weights`: float32 [N]; `likeliest`: bool [N]."""
    loss = -(log_probs * weights).sum() / tokens
    right = (likeliest * weights).sum(dtype=torch.float64)
    return loss, torch.stack([loss.detach().double(), right, torch.zeros_like(right)])


def preference(
    log_probs: Tensor, reference: Tensor, rows: Sequence[int], beta: float, pairs: int
) -> tuple[Tensor, Sums]:
    """The share of a micro batch in the loss of a step with `pairs` pairs, and its sums.

    `log_probs`, `reference`: float32 [N], of the model and of its base; `rows`: how many of these each text has,
    preferred and other one in turn."""
    gains = [part.sum() for part in (log_probs - reference).split_with_sizes(list(rows))]
    margins = beta * (torch.stack(gains[0::2]) - torch.stack(gains[1::2]))
    loss = -functional.logsigmoid(margins).sum() / pairs
    told = margins.detach().double()
    return loss, torch.stack([loss.detach().double(), (told > 0).sum(dtype=torch.float64), told.sum()])
