r"""Tokens of one choice to what its client sees: text with stop strings and log probabilities; reasoning and calls.

Of text that may become a stop string is held back what may be a part of it, and a match cuts the text:

    fed        "...the answer is 42\nUs"        stop: "\nUser:"
    emitted    "...the answer is 42"
    held back                      "\nUs"       may still become the stop string

The match that ends first wins, and of those that end there the longest: this does not depend on how the text was cut
into pieces. What the parser of calls holds back depends on the tokens alone, too (`cursor.py`): a reader that has read
as many tokens in silence goes on within a call exactly where another stood.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.gateway.tokenizer.detokenizer import Detokenizer
from services.gateway.tool_calls.families import FAMILIES
from services.gateway.tool_calls.parser import CallDelta, CallNumbering, Parser
from services.gateway.tool_calls.parsers.scanner import Event, Text, Thought
from shared.messages import FinishReason, TokenEntry, TokenLogprobs
from shared.messages.records import Parsing

StopReason = str | int | None
"""vLLM's: the stop string that has ended a text, or the id of the client's stop token; None: neither has."""


class ScoredToken(NamedTuple):
    """A token with its log probabilities, and where its text begins in the choice's text."""

    token: int
    logprobs: TokenLogprobs | None
    """None of a prompt's first token, which follows nothing."""
    offset: int

    @property
    def known(self) -> TokenLogprobs:
        """Of any other token."""
        assert self.logprobs is not None, "a token of an output follows something"
        return self.logprobs


class Piece(NamedTuple):
    """What is new for the client."""

    text: str
    scored: Sequence[ScoredToken]
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    tokens: Sequence[int] = ()
    """Where token ids are shown instead of text."""
    prompt: bytes | None = None
    """Log probabilities of the prompt, with the first piece of an answer that they are to be shown with."""
    ids: Sequence[int] = ()
    """Ids of all tokens read since the last piece, where they are shown beside the text."""
    begins: bool = False
    """Whether nothing of its choice precedes it."""
    stop_reason: StopReason = None
    """With the end of its choice."""

    @property
    def visible(self) -> bool:
        """Whether there is more to show than log probabilities."""
        return bool(self.text or self.reasoning or self.calls or self.tokens) or self.prompt is not None


class Output(Protocol):
    """One choice's output as a `Run` reads it: `TextOutput`, or what takes its text apart."""

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        ...

    @property
    def finish(self) -> str:
        """OpenAI's finish reason, "" while it goes on."""
        ...

    @property
    def stop_reason(self) -> StopReason: ...

    @property
    def mean_logprob(self) -> float:
        """Log probability per token, where there are any."""
        ...

    def feed(self, entry: TokenEntry) -> None: ...

    def take(self) -> Piece: ...


class TextOutput:
    """One choice's output. `finish` is set once: by the ring, or by a stop string found here."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        *,
        logprobs: bool,
        include_stop: bool = False,
        min_tokens: int = 0,
        prompt_scores: bool = False,
        score_end: bool = False,
        token_ids: bool = False,
        told_stop_ids: Sequence[int] = (),
    ) -> None:
        """`include_stop`: what ends the text is part of it; `min_tokens`: tokens whose text ends at no stop string;
        `prompt_scores`: whether those of the prompt are shown; `score_end`: whether a token that ends the text and is
        no part of it has its log probability shown all the same; `token_ids`: whether those of all tokens are shown;
        `told_stop_ids`: those of `stop_token_ids` that are a stop reason."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, included=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._logprob_sum = 0.0
        self._stop_token_ids = frozenset(stop_token_ids)
        self._logprobs = logprobs
        self._scored: list[ScoredToken] = []
        self._awaits_prompt = prompt_scores
        self._prompt: bytes | None = None
        self._score_end = score_end
        self._ids: list[int] | None = [] if token_ids else None
        self._told_stop_ids = told_stop_ids
        self._decoded = 0
        """Characters decoded, those held back included."""
        self._shown = 0
        self._text: list[str] = []
        self.tokens = 0
        """Output tokens, as usage counts them, and where this reader stands in the log."""
        self.finish: FinishReason = ""
        self.stop_reason: StopReason = None

    def feed(self, entry: TokenEntry) -> None:
        """Takes the next entry; what follows a stop string is ignored."""
        if self.finish:
            return
        tokens = entry.tokens
        if self._awaits_prompt and (tokens or entry.finish):
            self._awaits_prompt, self._prompt = False, entry.prompt_scores
        scores = (entry.logprobs or []) if self._logprobs else []
        before = self.tokens
        for index, token in enumerate(tokens):
            self.tokens += 1
            if index < len(scores):
                self._logprob_sum += scores[index].logprob
            ends = index == len(tokens) - 1 and entry.finish == "stop" and token in self._stop_token_ids
            hidden = ends and not self._include_stop  # it ended the text and is no part of it
            if hidden and not self._score_end:
                break
            if index < len(scores):
                self._scored.append(ScoredToken(token, scores[index], self._decoded))
            if hidden:
                break
            self._show(self._detokenizer.feed([token]))
            if self._stops.matched:
                break
        if self._ids is not None:
            self._ids += tokens[: self.tokens - before]
        self._end(entry)

    def _show(self, text: str) -> None:
        if not text:
            return
        self._decoded += len(text)
        shown = text if self.tokens < self._min_tokens else self._stops.feed(text)
        if shown:
            self._text.append(shown)
            self._shown += len(shown)

    def _end(self, entry: TokenEntry) -> None:
        if entry.finish in ("stop", "length") and not self._stops.matched:
            if entry.finish == "stop" and entry.tokens and entry.tokens[-1] in self._told_stop_ids:
                self.stop_reason = entry.tokens[-1]
            self._show(self._detokenizer.flush())
            self.finish = entry.finish
        if self._stops.matched:
            self.finish, self.stop_reason = "stop", self._stops.matched
            self._scored = [scored for scored in self._scored if scored.offset < self._shown]
        elif self.finish:
            self._text.append(self._stops.flush())

    @property
    def mean_logprob(self) -> float:
        """Log probability per token."""
        return self._logprob_sum / max(1, self.tokens)

    def take(self) -> Piece:
        """What has become visible since the last call."""
        text = "".join(self._text)
        self._text.clear()
        ready = len(self._scored)
        while not self.finish and ready and self._scored[ready - 1].offset >= self._shown:
            ready -= 1  # its text is held back, and may be cut
        scored, self._scored = self._scored[:ready], self._scored[ready:]
        prompt, self._prompt = self._prompt, None
        ids: list[int] = []
        if self._ids:
            ids, self._ids = self._ids, ids
        return Piece(text, scored, prompt=prompt, ids=ids)


class StopStrings:
    """Pure. With no stop strings it passes everything through."""

    __slots__ = ("_held", "_included", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`stops` are not empty strings; `included`: the one that ends the text is part of it."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._included = included
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched = ""
        """The one that has ended the text."""

    def feed(self, text: str) -> str:
        """The text that can be shown now. Once `matched`, nothing more comes."""
        if self.matched or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, start = match
            self.matched, self._held = text[start:end], ""
            return text[: end if self._included else start]
        keep = self._length_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Where the winning match ends and starts."""
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches) if matches else None

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class ParsedOutput:
    """Used as `TextOutput` is."""

    def __init__(self, output: TextOutput, parsing: Parsing, generation_id: str) -> None:
        self._output = output
        self._parsing = parsing
        family = FAMILIES.get(parsing.tools)
        self._parser = Parser(
            family.machine if family else None,
            parsing.types,
            thinking=parsing.reasoning,
            opened=parsing.opened,
        )
        self._calls = CallNumbering(generation_id, single=parsing.single)
        self._events: list[Event] = []
        self._scored: list[ScoredToken] = []
        self._prompt: bytes | None = None
        self._ids: list[int] = []
        self._ended = False

    @property
    def tokens(self) -> int:
        return self._output.tokens

    @property
    def stop_reason(self) -> StopReason:
        return self._output.stop_reason

    @property
    def mean_logprob(self) -> float:
        return self._output.mean_logprob

    @property
    def finish(self) -> str:
        """`tool_calls` where the model has stopped after a call of its own choice, as in OpenAI's API; `stop`
        where the function was demanded by its name."""
        reason = self._output.finish
        if reason != "stop" or not self._calls.begun or self._parsing.named:
            return reason
        return "function_call" if self._parsing.legacy else "tool_calls"

    def feed(self, entry: TokenEntry) -> None:
        """Takes the next entry."""
        if self._ended:
            return
        self._output.feed(entry)
        piece = self._output.take()
        self._scored += piece.scored
        self._ids += piece.ids
        self._prompt = self._prompt if piece.prompt is None else piece.prompt
        self._events += self._parser.feed(piece.text)
        if self._output.finish:
            self._ended = True
            self._events += self._parser.finish()

    def take(self) -> Piece:
        """What has become visible since the last call."""
        events, self._events = self._events, []
        scored, self._scored = self._scored, []
        prompt, self._prompt = self._prompt, None
        ids, self._ids = self._ids, []
        return Piece(
            "".join(event.text for event in events if isinstance(event, Text)),
            scored,
            "".join(event.text for event in events if isinstance(event, Thought)),
            self._calls.deltas(events),
            prompt=prompt,
            ids=ids,
        )
