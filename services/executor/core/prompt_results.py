"""What is wanted of a prompt beside its first token, gathered as the prompt is computed: its vector or its classes'
logits, the log probabilities of its tokens, or those of given tokens behind it. Which rows of a step count is decided
in `scheduler/features/prompt_results.py`. Free of torch.

    row of p0 gives those of p1, that of p1 those of p2 ...      the last row's are the first output token's

    bytes     float32 log probability | int32 rank | top x (int32 token | float32 log probability)     of each of p1 ...
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_LEAST = 1e-12  # below this length a vector has no direction, and is left as it is


class PromptRows:
    """The rows of one prompt that something is wanted of, by their positions, as they are computed."""

    def __init__(self, first: int, end: int) -> None:
        self._next, self._end = first, end

    def rows(self, start: int, end: int) -> tuple[int, int] | None:
        """Which of the positions [start, end) count and have not been counted; None: none."""
        start, end = max(start, self._next), min(end, self._end)
        return (start, end) if start < end else None

    @property
    def whole(self) -> bool:
        """Whether all rows that count have been counted: what is left of the prompt need not be computed for them."""
        return self._next >= self._end


# Pooling: the engine pools by itself, whatever the model wants, and is told of all of a prompt's rows at once.
WHOLE = "whole"


class Vector(PromptRows):
    """The sum of what has been computed of one prompt."""

    def __init__(self, pooling: str, tokens: int, *, normalized: bool = True, size: int = 0) -> None:
        """`pooling` as `model/card.py` has it, or `WHOLE`; `tokens`: of the prompt; `normalized`: it is brought to
        length 1; `size`: how many of its numbers, the first ones, are wanted, 0: all."""
        whole = (0, tokens)
        first, last = {"mean": whole, WHOLE: whole, "cls": (0, 1), "last": (tokens - 1, tokens)}[pooling]
        super().__init__(first, last)
        self._count = last - first if pooling == "mean" else 1
        self._normalized, self._size = normalized, size
        # Whether the prompt may begin with what is cached of others: no row that counts is missing then.
        self.shares = pooling == "last"
        self._sum: NDArray[np.float64] | None = None

    def add(self, part: Floats, end: int) -> None:
        """The sum of the rows before position `end` that had not been counted."""
        self._sum = part.astype(np.float64) if self._sum is None else self._sum + part
        self._next = end

    @property
    def finite(self) -> bool:
        return self._sum is not None and bool(np.isfinite(self._sum).all())

    def bytes(self) -> bytes:
        """The vector: float32, little-endian."""
        assert self._sum is not None, "a prompt has at least one row that counts"
        mean = self._sum / self._count
        if self._size:
            mean = mean[: self._size]
        length = max(float(np.linalg.norm(mean)), _LEAST) if self._normalized else 1.0
        return (mean / length).astype("<f4").tobytes()


# What is told of a token that cannot come at all: JSON has no minus infinity. OpenAI's and vLLM's number.
LEAST = -9999.0


class PromptTokenScores(NamedTuple):
    """Of Q rows, each with the token that follows in its prompt."""

    logprobs: NDArray[np.float32]  # [Q]: of that token; NaN where a row's logits are no numbers
    # [Q]: 1 for the most likely token; 1 + the number of tokens that are more likely.
    ranks: NDArray[np.int32]
    # [Q, K]: the most likely ones, the most likely first, of equals the one with the smaller id.
    top_tokens: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]  # [Q, K]

    def part(self, start: int, end: int) -> "PromptTokenScores":
        """Of the rows [start, end)."""
        where = slice(start, end)
        return PromptTokenScores(
            self.logprobs[where], self.ranks[where], self.top_tokens[where], self.top_logprobs[where]
        )


def no_scores(top: int = 0) -> PromptTokenScores:
    shape = (0, top)
    nothing = np.zeros(0, np.float32), np.zeros(0, np.int32)
    return PromptTokenScores(*nothing, np.zeros(shape, np.int32), np.zeros(shape, np.float32))


class PromptScores(PromptRows):
    """The log probabilities that have been computed of one prompt."""

    def __init__(self, top: int, tokens: int) -> None:
        """`top`: most likely tokens that are told of each row; `tokens`: of the prompt."""
        self.top = top
        super().__init__(0, tokens - 1)
        self._layout = np.dtype(
            [("logprob", "<f4"), ("rank", "<i4"), ("top", [("token", "<i4"), ("logprob", "<f4")], (top,))]
        )
        self._parts: list[bytes] = []
        self.finite = True

    def add(self, scores: PromptTokenScores, end: int) -> None:
        """Of the rows before position `end` that had not been scored."""
        rows = np.zeros(len(scores.logprobs), self._layout)
        rows["logprob"] = np.maximum(scores.logprobs, LEAST)
        rows["rank"] = scores.ranks
        rows["top"]["token"] = scores.top_tokens[:, : self.top]
        rows["top"]["logprob"] = np.maximum(scores.top_logprobs[:, : self.top], LEAST)
        self._parts.append(rows.tobytes())
        self.finite = self.finite and not bool(np.isnan(scores.logprobs).any())
        self._next = end

    def take(self) -> bytes:
        """`TokenEntry.prompt_scores`, once."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


class NamedScores(PromptRows):
    """The log probabilities of given tokens behind one prompt."""

    shares = True

    def __init__(self, targets: list[int], tokens: int) -> None:
        """`targets`: these tokens; `tokens`: of the prompt."""
        super().__init__(tokens - 1, tokens)
        self.targets = targets
        self._logprobs: NDArray[np.float32] | None = None

    def add(self, scores: PromptTokenScores, end: int) -> None:
        """What the last row gives, for each of the targets."""
        self._logprobs = scores.logprobs
        self._next = end

    @property
    def finite(self) -> bool:
        return self._logprobs is not None and not bool(np.isnan(self._logprobs).any())

    def bytes(self) -> bytes:
        """float32, little-endian, in the order of the targets."""
        assert self._logprobs is not None, "the prompt has been computed"
        return np.maximum(self._logprobs, LEAST).astype("<f4").tobytes()
