"""Where a sequence's last tokens have stood before in it, found in constant time per token.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): text that repeats itself, or its prompt, is likely
to go on as it did before.

    tokens   . . . A B C D E . . . A B C        the last 3-gram stood before D E: these are proposed
                         ^ source

For each n there is a table from the hash of an n-gram to the position behind its last occurrence. A table
has a slot for every two tokens at least; of n-grams that meet in a slot the newer stays. What is found is
compared with the tokens, so that a meeting costs a find and never gives a wrong one.
"""

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST, SHORTEST = 4, 2
"""Lengths of the n-grams that are looked for."""
MOST_COMPARED = 8
"""A match is measured back to this many tokens."""

_WEIGHTS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd 32-bit numbers: the sum of four products with tokens stays below 2**64."""
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SMALLEST_BITS = 8
_FEW = 32
"""So many new tokens, or more, are indexed by arrays and not one by one."""

UInt64Array = NDArray[np.uint64]


class Match(NamedTuple):
    """An earlier occurrence of the sequence's end."""

    source: int
    """Position of the token that followed it."""
    length: int
    """Tokens that agree, `MOST_COMPARED` at most."""


class NgramIndex:
    """The n-grams of one sequence. Follows its tokens as they grow; nothing is scanned twice."""

    def __init__(self, tokens: "array[int]") -> None:
        """`tokens` (int32, not negative) is the sequence's own array."""
        self._tokens = tokens
        self._indexed = 0
        """n-grams that end at this position, or before, are in the tables."""
        self._bits = 0
        self._tables: list[array[int]] = []
        """For n from `LONGEST` down: by hash, the position behind the n-gram; 0: none."""

    def find(self) -> Match | None:
        """The newest earlier occurrence of the longest n-gram that the tokens end with."""
        self._grow()
        tokens, end = self._tokens, len(self._tokens)
        for table, n in zip(self._tables, range(LONGEST, SHORTEST - 1, -1), strict=True):
            source = table[self._slot(end, n)] if end > n else 0
            if source and tokens[source - n : source] == tokens[end - n :]:
                return Match(source, self._measure(source, end, n))
        return None

    def continuation(self, source: int, count: int) -> list[int]:
        """`count` tokens from `source` on. Where the tokens end before, they go on as from `source`: what
        has begun to repeat itself may do so again and again."""
        period = self._tokens[source : source + count].tolist()
        return (period * (count // len(period) + 1))[:count]

    def _measure(self, source: int, end: int, length: int) -> int:
        tokens = self._tokens
        while (
            length < MOST_COMPARED
            and length < source
            and tokens[source - length - 1] == tokens[end - length - 1]
        ):
            length += 1
        return length

    # --- tables ----------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Takes up the n-grams that have been followed by a token since the last call."""
        ready = len(self._tokens) - 1
        if 2 * len(self._tokens) > 1 << self._bits:
            self._bits = max(_SMALLEST_BITS, (2 * len(self._tokens)).bit_length())
            self._tables = [array("i", bytes(4 << self._bits)) for _ in range(SHORTEST, LONGEST + 1)]
            self._indexed = 0
        if ready - self._indexed >= _FEW:
            self._index_many(ready)
        else:
            for end in range(self._indexed + 1, ready + 1):
                for table, n in zip(self._tables, range(LONGEST, SHORTEST - 1, -1), strict=True):
                    if end >= n:
                        table[self._slot(end, n)] = end
        self._indexed = max(ready, 0)

    def _slot(self, end: int, n: int) -> int:
        """Where the tables have the n-gram before `end`."""
        total = 0
        for weight, token in zip(_WEIGHTS, self._tokens[end - n : end], strict=False):
            total += weight * token
        return (total * _SPREAD & _MASK) >> (64 - self._bits)

    def _index_many(self, ready: int) -> None:
        """The same for many n-grams at once."""
        for table, n in zip(self._tables, range(LONGEST, SHORTEST - 1, -1), strict=True):
            first = max(self._indexed + 1, n)
            # A copy: while an array is viewed it cannot grow.
            tokens = np.array(self._tokens[first - n : ready], np.uint64)
            ends = np.arange(first, ready + 1, dtype=np.int32)
            totals: UInt64Array = np.zeros(len(ends), np.uint64)
            for offset in range(n):
                totals += np.uint64(_WEIGHTS[offset]) * tokens[offset : offset + len(ends)]
            slots = (totals * np.uint64(_SPREAD)) >> np.uint64(64 - self._bits)
            np.frombuffer(table, np.int32)[slots] = ends  # of equal slots the last one counts
