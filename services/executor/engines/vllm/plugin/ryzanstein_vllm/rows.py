"""A request in vLLM's batch: what its next token depends on, counted over the whole answer."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .grammars import Grammars, Guide, RowFailed, Words, packed
from .sampling_options import SamplingOptions


class OutputCounts:
    """Distinct tokens and how often each is in the output."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._table = np.zeros((2, 64), np.int64)

    @property
    def table(self) -> NDArray[np.int64]:
        """[tokens, occurrences]. A view: not to be kept over an `add`."""
        return self._table[:, : len(self._slots)]

    def add(self, tokens: Sequence[int], times: Literal[0, 1]) -> None:
        """`times` is 0 for tokens that are only to be listed."""
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == self._table.shape[1]:
                self._table = np.hstack((self._table, np.zeros_like(self._table)))
            self._table[0, slot] = token
            self._table[1, slot] += times


class Row:
    """A request in vLLM's batch, and what its next token depends on."""

    def __init__(
        self, options: SamplingOptions, prompt: Sequence[int] | None, output: Sequence[int], grammars: Grammars
    ) -> None:
        """`output`: vLLM's list, which grows with each step."""
        prompt = prompt or ()  # embeddings have no tokens
        self.options = options
        self.counts: OutputCounts | None = None
        self.guide: Guide | None = None
        self.problem = ""  # why it has failed
        if len(prompt) < options.prompt_tokens:
            self.problem = "The prompt has fewer tokens than prompt_tokens says."
        self._prompt = prompt[: options.prompt_tokens] if options.repetition_penalty != 1 else ()
        self._earlier = list(prompt[options.prompt_tokens :])
        self._output = output
        self._grammars = grammars
        self._seen = -1  # tokens of `output` that counts and guide know of; -1: not even the earlier ones
        self._allowed: Words | None = None
        self._tail: list[int] = []  # of the output, as much as a bad word is long
        self._memory = max((len(word) for word in options.bad_words), default=0)

    @property
    def position(self) -> int:
        """Of the next token, in the whole answer."""
        return len(self._earlier) + len(self._output)

    def follow(self) -> None:
        """Takes in the tokens that came since the last step. Raises `RowFailed`."""
        options = self.options
        if not (options.counts or options.bad_words or options.grammar):
            return
        if not 0 <= self._seen <= len(self._output):  # at first, and where vLLM has taken tokens back
            self._begin()
        fresh = self._output[self._seen :]
        if not fresh:
            return
        if min(fresh) < 0:
            raise RowFailed("vLLM has not told the last token in time: start it with --no-async-scheduling.")
        self._take(fresh)
        self._seen += len(fresh)

    def mask(self, width: int) -> Words | None:
        """What may be drawn next, of `width` tokens; None: all. After `follow`. Raises `RowFailed`."""
        width = min(width, self.options.vocab_size or width)
        mask = None if self.guide is None else self.guide.follow(width)
        if self.guide is not None and self.guide.complete:
            return mask  # whatever else is asked for: it can only end
        if self.options.allowed_token_ids:
            if self._allowed is None:
                self._allowed = packed(self.options.allowed_token_ids, width)
            mask = self._allowed if mask is None else mask & self._allowed
        if banned := self._banned():
            hidden = packed(banned, width)
            mask = ~hidden if mask is None else mask & ~hidden
        return mask

    def _begin(self) -> None:
        options, self._tail = self.options, []
        if options.counts:
            self.counts = OutputCounts()
            self.counts.add(self._prompt, 0)
        if options.grammar is not None:
            self.guide = self._grammars.start(options.grammar, options.stop_token_ids)
        self._take(self._earlier)
        self._seen = 0

    def _take(self, tokens: Sequence[int]) -> None:
        if self._memory:
            self._tail = [*self._tail, *tokens][-self._memory :]
        if self.counts is not None:
            self.counts.add(tokens, 1)
        if self.guide is not None and tokens:
            self.guide.advance(tokens)

    def _banned(self) -> list[int]:
        options = self.options
        banned = list(options.stop_token_ids) if self.position < options.min_tokens else []
        for *beginning, last in options.bad_words:
            if not beginning or self._tail[-len(beginning) :] == beginning:
                banned.append(last)
        return banned
