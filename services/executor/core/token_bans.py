"""Tokens that must not be drawn: an end that comes too early, what is not allowed, the last token of a bad word.

    bad word   [ 7 3 9 ]        output so far  [ ... 7 3 ]      banned now: 9

Pure: a function of the request and of its output so far, so a continuation on another ring bans the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.messages import SamplingParams

Int64Array = NDArray[np.int64]
_NONE: Int64Array = np.zeros(0, np.int64)


class TokenBans:
    """What one sequence may not draw. Follows its output."""

    def __init__(self, params: SamplingParams, stops: Sequence[int], generated: Sequence[int]) -> None:
        """`stops`: the request's stop tokens; `generated`: output tokens so far."""
        self._min_tokens = params.min_tokens
        self._stops: Int64Array = np.unique(np.array(stops, np.int64)) if params.min_tokens else _NONE
        self._words, self._lengths = _by_beginning(params.bad_words)
        self._memory = max((len(word) for word in params.bad_words), default=1) - 1
        self._tail = list(generated[len(generated) - self._memory :]) if self._memory else []
        self._position = len(generated)
        self.allowed: Int64Array | None = (
            np.unique(np.array(params.allowed_token_ids, np.int64)) if params.allowed_token_ids else None
        )
        """The only tokens that may be drawn, ascending; None: all."""

    @property
    def banned(self) -> Int64Array:
        """Tokens that may not be drawn next, ascending, each once."""
        stops = self._stops if self._position < self._min_tokens else _NONE
        begun = [
            ends
            for length in self._lengths
            if (ends := self._words.get(tuple(self._tail[len(self._tail) - length :])))
        ]
        words = [end for ends in begun for end in ends]
        return np.union1d(stops, np.array(words, np.int64)) if words else stops

    def advance(self, token: int) -> None:
        """`token` has been put out."""
        self._position += 1
        if self._memory:
            self._tail = [*self._tail, token][-self._memory :]

    def ahead(self, tokens: Sequence[int]) -> "TokenBans":
        """As if `tokens` were put out too."""
        later = object.__new__(TokenBans)
        later.__dict__.update(self.__dict__)
        for token in tokens:
            later.advance(token)
        return later


def _by_beginning(words: Sequence[Sequence[int]]) -> tuple[dict[tuple[int, ...], list[int]], list[int]]:
    """By all but the last token of some words, what these end with; and how long these beginnings are. So a step
    looks once for each length, however many words there are."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for word in words:
        ends.setdefault(tuple(word[:-1]), []).append(word[-1])
    return ends, sorted({len(beginning) for beginning in ends})


def token_bans_of(params: SamplingParams, stops: Sequence[int], generated: Sequence[int]) -> TokenBans | None:
    """None where nothing is ever banned."""
    if not (params.allowed_token_ids or params.bad_words or (params.min_tokens and stops)):
        return None
    return TokenBans(params, stops, generated)


def problem_with_bans(params: SamplingParams, stops: Sequence[int], vocab_size: int) -> str | None:
    """What is wrong with them, as half a sentence; None when they can be sampled with."""
    tokens = [*params.allowed_token_ids, *(token for word in params.bad_words for token in word)]
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        return "allowed_token_ids or bad_words has a token outside the model's vocabulary"
    if not all(params.bad_words):
        return "bad_words has a word without tokens"
    always = {word[0] for word in params.bad_words if len(word) == 1}
    allowed = set(params.allowed_token_ids)
    last = {word[-1] for word in params.bad_words}
    ends = set(stops) if params.min_tokens else set()
    if allowed and not allowed - last - ends:
        return "allowed_token_ids leaves nothing to draw beside bad_words and the stop tokens"
    if len(always | last | ends) >= vocab_size:
        return "bad_words leaves nothing to draw"
    return None
