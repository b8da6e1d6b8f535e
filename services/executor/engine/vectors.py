"""The vector of one prompt, summed up as the prompt is computed (`embedding.py` draws how). Free of torch."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_LEAST = 1e-12
"""Below this length a vector has no direction, and is left as it is."""


class Vector:
    """The sum of what has been computed of one prompt."""

    def __init__(self, pooling: str, tokens: int) -> None:
        """`pooling` as `model/pooling.py` has it; `tokens`: of the prompt."""
        first, last = {"mean": (0, tokens), "cls": (0, 1), "last": (tokens - 1, tokens)}[pooling]
        self._next, self._end = first, last
        """Rows that are still to be counted, by their positions."""
        self._count = last - first
        self.shares = pooling == "last"
        """Whether the prompt may begin with what is cached of others: no row that counts is missing then."""
        self._sum: NDArray[np.float64] | None = None

    def rows(self, start: int, end: int) -> tuple[int, int] | None:
        """Which of the positions [start, end) count and have not been counted; None: none."""
        start, end = max(start, self._next), min(end, self._end)
        return (start, end) if start < end else None

    def add(self, part: Floats, end: int) -> None:
        """The sum of the rows before position `end` that had not been counted."""
        self._sum = part.astype(np.float64) if self._sum is None else self._sum + part
        self._next = end

    @property
    def whole(self) -> bool:
        """Whether all rows that count have been counted: what is left of the prompt need not be computed."""
        return self._next == self._end

    @property
    def finite(self) -> bool:
        return self._sum is not None and bool(np.isfinite(self._sum).all())

    def bytes(self) -> bytes:
        """The vector, of length 1: float32, little-endian."""
        assert self._sum is not None, "a prompt has at least one row that counts"
        mean = self._sum / self._count
        return (mean / max(float(np.linalg.norm(mean)), _LEAST)).astype("<f4").tobytes()
