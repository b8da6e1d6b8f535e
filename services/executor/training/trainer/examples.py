"""A job's tokenized examples, and the order in which they are learnt from.

    epoch e     a permutation of all units, drawn from (seed, e)
    step s      the next `batch_size` units of it, the last step of an epoch what is left
    micro batch units of one step, packed end to end up to a number of tokens: what is computed at once

A unit is an example, of DPO a pair: both texts of a pair are computed at once. Nothing here depends on what was
computed before, so a step can be made again at any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.executor.training.batch import PackedBatch
from shared.errors import InternalError
from shared.messages.training import Examples

# Of a micro batch, context included; a longer unit is alone in one. A constant, not what there is memory for: with
# other micro batches the sums would be others.
MICRO_BATCH_TOKENS = 2048
_SEED_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class ExampleSet:
    """Tokenized examples, end to end."""

    tokens: npt.NDArray[np.int32]  # [T]
    weights: npt.NDArray[np.uint8]  # [T], 0 or 1: whether a loss is taken of predicting the token
    starts: npt.NDArray[np.int64]  # [examples + 1]: where each begins, and where the last one ends
    unit: int  # examples of a unit: 1, of DPO 2

    @property
    def units(self) -> int:
        return (len(self.starts) - 1) // self.unit

    def lengths(self, units: Sequence[int]) -> list[int]:
        """Tokens of each of `units`, context included."""
        starts, size = self.starts, self.unit
        return [int(starts[(unit + 1) * size] - starts[unit * size]) for unit in units]

    def trained(self, units: Sequence[int]) -> int:
        """Tokens of `units` that a loss is taken of. The first token of an example has nothing that predicts it."""
        return sum(int(self.weights[start + 1 : end].sum()) for unit in units for start, end in self._extents(unit))

    def packed(self, units: Sequence[int], device: torch.device) -> PackedBatch:
        """The examples of `units`, end to end."""
        extents = [extent for unit in units for extent in self._extents(unit)]
        tokens = np.concatenate([self.tokens[start:end] for start, end in extents]).astype(np.int64)
        weights = np.concatenate([self.weights[start:end] for start, end in extents])
        lengths = [end - start for start, end in extents]
        weights[np.cumsum([0, *lengths[:-1]])] = 0
        targets = np.flatnonzero(weights)
        return PackedBatch(
            tokens=torch.from_numpy(tokens).to(device),
            lengths=lengths,
            rows=torch.from_numpy(targets - 1).to(device),
            targets=torch.from_numpy(tokens[targets]).to(device),
            weight_rows=torch.ones(len(targets), dtype=torch.float32, device=device),
        )

    def rows_of_examples(self, units: Sequence[int]) -> list[int]:
        """How many rows of `packed(units)` each of its examples has, in order."""
        return [int(self.weights[start + 1 : end].sum()) for unit in units for start, end in self._extents(unit)]

    def _extents(self, unit: int) -> list[tuple[int, int]]:
        first = unit * self.unit
        return [
            (int(self.starts[example]), int(self.starts[example + 1])) for example in range(first, first + self.unit)
        ]


def read_examples(examples: Examples, unit: int, what: str) -> ExampleSet:
    """As the message has them. Raises `InternalError` where its parts do not fit together; `what` they are is told."""
    damaged = InternalError(f"The tokenized {what} examples of the job are damaged; create the job again.")
    if len(examples.lengths) % 4 or len(examples.tokens) % 4:
        raise damaged
    lengths = np.frombuffer(examples.lengths, dtype="<u4").astype(np.int64)
    tokens = np.frombuffer(examples.tokens, dtype="<i4").astype(np.int32, copy=False)
    weights = np.frombuffer(examples.weights, dtype=np.uint8)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    whole = len(tokens) == len(weights) == starts[-1] and len(lengths) % unit == 0 and (lengths > 0).all()
    if not whole or (len(weights) and weights.max() > 1):
        raise damaged
    return ExampleSet(tokens, weights, starts, unit)


def epoch_order(seed: int, epoch: int, units: int) -> npt.NDArray[np.int64]:
    """A permutation of `units`, drawn from (seed, epoch).

    Made of the counter-based generator's raw numbers, which are the same in every version of NumPy (NEP 19), as those
    of its distributions are not. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    numbers = np.random.Philox(key=np.array([seed & _SEED_BITS, epoch], dtype=np.uint64)).random_raw(units)
    return np.argsort(numbers, kind="stable")


def micro_batches(units: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """`units`, with so many tokens each, packed into few micro batches of up to `most` tokens: the longest first, each
    into the first one that has room (first-fit decreasing). A unit of more than `most` is alone in one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for at in sorted(range(len(units)), key=lambda at: (-lengths[at], at)):
        length = lengths[at]
        chosen = next((index for index, free in enumerate(room) if free >= length), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(most)
        bins[chosen].append(units[at])
        room[chosen] -= length
    return bins
