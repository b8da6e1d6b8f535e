"""Tokens of one choice to the text that its client sees: detokenization, stop strings, logprobs."""

from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.stop_strings import StopStrings
from services.gateway.tokenization import Detokenizer
from shared.messages import FinishReason, TokenEntry, TokenLogprobs


class ScoredToken(NamedTuple):
    """A token with its log probabilities, and where its text begins in the choice's text."""

    token: int
    logprobs: TokenLogprobs
    offset: int


class Piece(NamedTuple):
    """What is new for the client."""

    text: str
    scored: Sequence[ScoredToken]


class TextOutput:
    """One choice's output. `finish` is set once: by the ring, or by a stop string found here."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], stop_token_ids: Sequence[int], *, logprobs: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._logprobs = logprobs
        self._scored: list[ScoredToken] = []
        self._decoded = 0
        """Characters decoded, those held back included."""
        self._shown = 0
        self._text: list[str] = []
        self.tokens = 0
        """Output tokens, as usage counts them."""
        self.position = 0
        """Tokens whose text has been shown whole: where a reader of this text may resume the log."""
        self.finish: FinishReason = ""

    def feed(self, entry: TokenEntry) -> None:
        """Takes the next entry; what follows a stop string is ignored."""
        if self.finish:
            return
        tokens = entry.tokens
        self.tokens += len(tokens)
        if entry.finish == "stop" and tokens and tokens[-1] in self._stop_token_ids:
            tokens = tokens[:-1]  # it ended the text and is no part of it
        if self._logprobs and entry.logprobs:
            for token, logprobs in zip(tokens, entry.logprobs, strict=False):
                self._scored.append(ScoredToken(token, logprobs, self._decoded))
                self._show(self._detokenizer.feed([token]))
                if self._stops.matched:
                    break
        elif tokens:
            self._show(self._detokenizer.feed(tokens))
        self._end(entry)

    def _show(self, text: str) -> None:
        if not text:
            return
        self._decoded += len(text)
        shown = self._stops.feed(text)
        if shown:
            self._text.append(shown)
            self._shown += len(shown)
        if not self._stops.holding:
            self.position = self.tokens

    def _end(self, entry: TokenEntry) -> None:
        if self._stops.matched:
            self.finish = "stop"
            self._scored = [scored for scored in self._scored if scored.offset < self._shown]
        elif entry.finish in ("stop", "length"):
            rest = self._stops.flush()
            if rest:
                self._text.append(rest)
            self.finish = entry.finish
            self.position = self.tokens

    def take(self) -> Piece:
        """What has become visible since the last call."""
        text = "".join(self._text)
        self._text.clear()
        if not self._scored or not (text or self.finish):
            return Piece(text, ())
        scored, self._scored = self._scored, []
        return Piece(text, scored)
