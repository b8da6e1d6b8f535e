"""What computes a rank's steps in place of transformers' modules: one decoder per kind of machine.

CPU    native/decoder.py     our kernels in C
GPU    gpu/decoder.py        our kernels in Triton between PyTorch's products
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.executor.engine.plan import Int32Array, StepPlan
from services.executor.engine.vectors import Floats
from services.executor.progress import Progress


class Decoder(Protocol):
    """Holds a lowered model's weights and the rank's KV store, and runs step plans that compute some tokens."""

    @property
    def label(self) -> str:
        """What its share of a step is called in traces."""
        ...

    def forward(self, plan: StepPlan, progress: Progress, pools: Int32Array) -> tuple[Tensor, Floats]:
        """Computes one step; `progress` counts the layers.

        Returns this rank's share of the logits of `plan.sample_rows`, float32 or the model's dtype [R, rows of the
        head]; and of `pools`, int32 [P, 2], the sums of the normed hidden states of the rows [first, end), float32
        [P, hidden]. Raises `RingLost` when another rank is gone.
        """
        ...

    def forward_to_largest(self, plan: StepPlan, progress: Progress) -> tuple[Tensor, Tensor]:
        """`forward`, and then `largest` of its logits."""
        ...

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(largest value [R], its token int64 [R]) of `logits` [R, V], contiguous. Of those that tie the one with the
        smallest id; NaN is larger than all."""
        ...


def sums_of(states: Tensor, pools: Int32Array) -> Floats:
    """float32 [P, hidden]: of `states` [T, hidden] the sum of the rows [first, end) of each of `pools` int32 [P, 2]."""
    if not len(pools):
        return np.zeros((0, 0), np.float32)
    sums: Floats = (
        torch.stack([states[first:end].float().sum(dim=0) for first, end in pools.tolist()]).cpu().numpy()
    )
    return sums
