"""How a step's rows are shared out among programs. Pure.

Tiles hold rows of one sequence; a decode is a tile of one token. With few tiles and long contexts a GPU would stand
idle, so keys are split as well, in as many parts as fill it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_KEYS = 256
"""Of one part: below, putting parts together costs more than they save."""
MOST_SPLITS = 32


class Tiles(NamedTuple):
    """Of a step."""

    sequence: NDArray[np.int32]
    first: NDArray[np.int32]
    """The tile's first token among the sequence's of this step."""


def tiles_of(query_lens: NDArray[np.int64], tokens: int) -> Tiles:
    """Tiles of up to `tokens` tokens each, in the sequences' order."""
    counts = -(-query_lens // tokens)
    sequence = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    begins = np.cumsum(counts) - counts
    first = (np.arange(len(sequence)) - np.repeat(begins, counts)) * tokens
    return Tiles(sequence, first.astype(np.int32))


def splits_of(programs: int, longest: int, processors: int) -> int:
    """Parts of each tile's keys: 1, or a power of two that gives `processors` two programs each.

    `programs`: without splitting; `longest`: keys of the longest sequence.
    """
    splits = 1
    while splits < MOST_SPLITS and programs * splits < 2 * processors and longest > LEAST_KEYS * splits:
        splits *= 2
    return splits
