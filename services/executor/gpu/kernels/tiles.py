"""How a step's rows are shared out among programs. Pure.

Tiles hold rows of one sequence; a decode is a tile of one token. With few tiles and long contexts a GPU would stand
idle, so keys are split as well, in as many parts as fill it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_KEYS = 256  # of one part: below, putting parts together costs more than they save
MOST_SPLITS = 64
# Of each processor, where keys are split: two run at a time, and the more there are, the less is idle at the end.
PROGRAMS = 4
DECODE_ROWS = 16  # least rows of a tile: the least of a matrix product
PREFILL_ROWS = 128  # two groups of four warps, whose matrix instruction takes 64 rows each


SHARED = 227 << 10  # bytes of shared memory that a program can have on Hopper


class TileShape(NamedTuple):
    """How a program of `attend` is laid out."""

    keys: int  # BLOCK_N, of one turn
    edge: int  # the same where both stores are read or keys are masked: a divisor of it
    warps: int
    stages: int  # turns under way over quantized blocks: all but one are loads
    writable_stages: int  # the same over writable blocks


def tile_shape(rows: int, width: int, number_bytes: int, compressed: bool) -> TileShape:
    """For tiles of `rows` rows and heads of `width` numbers of `number_bytes` in writable blocks.

    A decode waits for memory. One turn's keys and values are 32 KiB in writable blocks, half of it in compressed ones, and
    two turns are on their way while a third is computed; three, or two, programs share a multiprocessor's 227 KiB. A
    bandwidth of 4.8 TB/s over 132 of them, at a latency of 800 ns, asks for 29 KiB on their way in each.

    A prefill waits for matrix products: the more keys in a turn, the fewer rescalings, as far as registers reach, of
    which codes on their way to the model's dtype take many; one program of eight warps has a multiprocessor for itself.
    """
    padded = 1 << (width - 1).bit_length()
    line = padded * number_bytes
    if rows <= 32:
        # Codes are half as long; but widths that are no power of two are read byte by byte, which takes registers.
        keys = _within((32768 if compressed and width == padded else 16384) // line, 16, 128)
        return TileShape(keys, _within(16384 // line, 16, min(keys, 64)), 4, 3, 2 if compressed else 3)
    # Beside the queries two turns of keys and values lie in shared memory.
    room = max(SHARED - rows * line, 0) // (4 * line)
    keys = _within(min(32768 // line, 1 << room.bit_length() >> 1), 16, 64 if compressed else 128)
    if compressed:
        keys = _within(16384 // line, 16, keys)
    edge = _within((8192 if compressed else 16384) // line, 16, min(keys, 64))
    return TileShape(keys, edge, 8 if rows > 64 else 4, 2, 2)


def rows_for(group: int, most_tokens: int) -> int:
    """BLOCK_M for sequences of up to `most_tokens` in this step: whole tokens, at least one; a power of two."""
    rows = max(DECODE_ROWS, group, min(most_tokens * group, PREFILL_ROWS))
    return 1 << (rows - 1).bit_length()


def _within(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


class StepTiles(NamedTuple):
    """Of a step."""

    sequence: NDArray[np.int32]
    first: NDArray[np.int32]  # the tile's first token among the sequence's of this step


def tiles_of(query_lens: NDArray[np.int64], tokens: int) -> StepTiles:
    """Tiles of up to `tokens` tokens each, in the sequences' order."""
    counts = -(-query_lens // tokens)
    sequence = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    begins = np.cumsum(counts) - counts
    first = (np.arange(len(sequence)) - np.repeat(begins, counts)) * tokens
    return StepTiles(sequence, first.astype(np.int32))


def splits_of(programs: int, longest: int, processors: int) -> int:
    """Parts of each tile's keys, at most: 1, or a power of two that gives `processors` enough programs.

    `programs`: without splitting; `longest`: keys of the longest sequence, or for a graph, which is launched for many
    lengths, of the longest that it may get: parts that would have fewer than `LEAST_KEYS` keys are left empty.
    """
    splits = 1
    while splits < MOST_SPLITS and programs * splits < PROGRAMS * processors and longest > LEAST_KEYS * splits:
        splits *= 2
    return splits


def scratch_numbers(splits: int, rows: int, heads: int, width: int) -> int:
    """float32 numbers that a launch of `rows` rows needs to put `splits` parts down."""
    return splits * rows * heads * (width + 2) if splits > 1 else 0
