"""What a model computes at once: examples end to end, with exact boundaries.

tokens    [ a0 a1 a2 a3 | b0 b1 | c0 c1 c2 ]     attention and positions begin anew at each example
rows            1  2      4            7           positions whose next token is trained on
targets        a2 a3     b1           c1           those tokens
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One forward and backward pass. Raises `ValueError` where its parts do not fit."""

    tokens: Tensor  # int64 [T]: examples end to end
    lengths: list[int]  # of each example; their sum is T
    rows: Tensor  # int64 [N]: positions whose next token is trained on
    targets: Tensor  # int64 [N]: those next tokens
    weight_rows: Tensor  # float32 [N]: what each of them counts

    def __post_init__(self) -> None:
        if sum(self.lengths) != len(self.tokens) or any(length < 1 for length in self.lengths):
            raise ValueError(
                f"examples of {sum(self.lengths)} tokens in all do not fill a batch of {len(self.tokens)} tokens"
            )
        if not len(self.rows) == len(self.targets) == len(self.weight_rows):
            raise ValueError("each position that is trained on has a target and a weight")


@dataclass(frozen=True)
class DropoutKey:
    """What the dropout of one pass is drawn from, beside the linear's name: recomputing it, and resuming the job, draw
    the same."""

    seed: int  # of the job
    step: int
    micro_step: int  # of the batches of the step
