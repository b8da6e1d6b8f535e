"""A token drawn from a row's weights by numbers keyed by (seed, position), so that small errors of the weights seldom
change it.

A continuation computes its logits in another batch, whose sums differ in their last bits. Where one number is compared
with the running sum over the whole vocabulary, the error of a likely token moves the borders of all that follow, and
among thousands of unlikely ones the number often lies at one. So the vocabulary is divided into FAN parts, one is taken
by a number of its own, and divided again: what moves a border is then the error of one part's share of a few.

    49,152 tokens: [0 .......... 262,144)  ─ number 0 ─▶ one of 8 parts of 32,768, as far as there are tokens
                       [32,768 .. 49,152)  ─ number 1 ─▶ one of 8 parts of 4,096  ... ─ number 5 ─▶ one of 8 tokens
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FAN = 8
LEVELS = 8  # numbers for a draw: enough for FAN ** LEVELS tokens
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def streams_of(seeds: Sequence[int]) -> NDArray[np.uint64]:
    return _mix(np.array(seeds, np.uint64) + _GAMMA)


def uniforms(streams: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), LEVELS for each row: outputs of SplitMix64, in 52 bits."""
    levels: NDArray[np.uint64] = np.arange(1, LEVELS + 1, dtype=np.uint64)
    outputs: NDArray[np.uint64] = np.array(positions, np.uint64)[:, None] * np.uint64(LEVELS) + levels
    states: NDArray[np.uint64] = streams[:, None] + outputs * _GAMMA
    return (_mix(states) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """A column for each row. `weights`: [rows, columns], some of each row above 0, whose columns alone are drawn;
    `numbers`: float64 [rows, LEVELS], in [0, 1)."""
    rows, columns = weights.shape
    sums = torch.zeros((rows, columns + 1), dtype=torch.float64, device=weights.device)
    torch.cumsum(weights, dim=-1, dtype=torch.float64, out=sums[:, 1:])
    first = torch.zeros((rows, 1), dtype=torch.int64, device=weights.device)
    end = torch.full_like(first, columns)
    borders = torch.arange(FAN + 1, device=weights.device)
    level, part = 0, 1
    while part * FAN < columns:
        part *= FAN
    while part:
        at = sums.gather(1, torch.minimum(first + borders * part, end))
        lowest, highest = at[:, :1], at[:, -1:]
        # Below the highest whatever the rounding: a part without weight is never taken.
        target = lowest + numbers[:, level : level + 1] * (highest - lowest)
        target = torch.minimum(target, torch.nextafter(highest, lowest))
        first = first + part * (at[:, 1:-1] <= target).sum(dim=-1, keepdim=True)
        end = torch.minimum(first + part, end)
        level, part = level + 1, part // FAN
    return first.squeeze(1)
