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
_SMALLEST_BITS, _LARGEST_BITS = 8, 18
"""Of the number of a table's slots: tables of a long text grow to 3 MiB together. Beyond it n-grams that meet in a
slot are lost, the older ones."""
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
        """For n from `SHORTEST` up: by hash, the position behind the n-gram; 0: none."""
        self._last: tuple[int, list[int]] = (0, [])
        """(position, slots of the n-grams before it) that `find` has looked at last."""

    def find(self) -> Match | None:
        """The newest earlier occurrence of the longest n-gram that the tokens end with."""
        self._grow()
        tokens, end = self._tokens, len(self._tokens)
        slots = self._slots(end)
        self._last = (end, slots)
        for at in range(len(slots) - 1, -1, -1):
            source = self._tables[at][slots[at]]
            n = at + SHORTEST
            if source and tokens[source - n : source] == tokens[end - n :]:
                return Match(source, self._measure(source, end, n))
        return None

    def continuation(self, source: int, count: int) -> list[int]:
        """`count` tokens from `source` on. Where the tokens end before, they go on as from `source`: what
        has begun to repeat itself may do so again and again."""
        period = self._tokens[source : source + count].tolist()
        return (period * (count // len(period) + 1))[:count]

    def _measure(self, source: int, end: int, length: int) -> int:
        tokens, most = self._tokens, min(MOST_COMPARED, source)
        while length < most and tokens[source - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    # --- tables ----------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Takes up the n-grams that have been followed by a token since the last call."""
        ready = len(self._tokens) - 1
        if 2 * ready >= 1 << self._bits and self._bits < _LARGEST_BITS:
            self._bits = min(max(_SMALLEST_BITS, (4 * ready).bit_length()), _LARGEST_BITS)
            self._tables = [array("i", bytes(4 << self._bits)) for _ in range(SHORTEST, LONGEST + 1)]
            self._indexed, self._last = 0, (0, [])
        if ready - self._indexed >= _FEW:
            self._index_many(ready)
        else:
            for end in range(self._indexed + 1, ready + 1):
                slots = self._last[1] if self._last[0] == end else self._slots(end)
                for table, slot in zip(self._tables, slots, strict=False):
                    table[slot] = end
        self._indexed = max(ready, 0)

    def _slots(self, end: int) -> list[int]:
        """Where the tables have the n-grams before `end`, the shortest first; fewer at the very beginning."""
        shift, slots, total = 64 - self._bits, [], 0
        for ahead, token in enumerate(reversed(self._tokens[max(end - LONGEST, 0) : end])):
            total += _WEIGHTS[ahead] * token
            if ahead + 1 >= SHORTEST:
                slots.append((total * _SPREAD & _MASK) >> shift)
        return slots

    def _index_many(self, ready: int) -> None:
        """The same for many n-grams at once."""
        first = self._indexed
        # A copy: while an array is viewed it cannot grow.
        tokens = np.array(self._tokens[max(first - LONGEST, 0) : ready], np.uint64)
        for table, n in zip(self._tables, range(SHORTEST, LONGEST + 1), strict=True):
            count = min(ready - first, len(tokens) - n + 1)
            totals: UInt64Array = np.zeros(count, np.uint64)
            for back in range(n):
                begin = len(tokens) - count - back
                totals += np.uint64(_WEIGHTS[back]) * tokens[begin : begin + count]
            slots = (totals * np.uint64(_SPREAD)) >> np.uint64(64 - self._bits)
            ends = np.arange(ready - count + 1, ready + 1, dtype=np.int32)
            np.frombuffer(table, np.int32)[slots] = ends  # of equal slots the last one counts
