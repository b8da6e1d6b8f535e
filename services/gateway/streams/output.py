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
from typing import Any, NamedTuple

import msgspec

from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.families import FAMILIES, markers_of
from services.gateway.tool_calls.parser import CallDelta, CallNumbering, Parser
from services.gateway.tool_calls.parsers.scanner import Event, Text, Thought
from shared.messages import GenerationRequest, TokenEntry, TokenLogprobs
from shared.messages.records import GenerationRecord

# vLLM's: the stop string that has ended a text, or the id of the client's stop token; None: neither has.
StopReason = str | int | None


def arguments_of(written: str) -> Any:
    """Arguments of a call, as the model has written them; None where they were cut off by the end of the answer."""
    try:
        return msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None


class ScoredToken(NamedTuple):
    """A token with its log probabilities, and where its text begins in the choice's text."""

    token: int
    logprobs: TokenLogprobs | None  # None of a prompt's first token, which follows nothing
    offset: int

    @property
    def known(self) -> TokenLogprobs:
        """Of any other token."""
        assert self.logprobs is not None, "a token of an output follows something"
        return self.logprobs


class OutputDelta(NamedTuple):
    """What is new of a choice for the client; of a whole response all of it."""

    text: str
    scored: Sequence[ScoredToken]
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    tokens: Sequence[int] = ()  # where token ids are shown instead of text
    # Log probabilities of the prompt, with the first piece of an answer that they are to be shown with.
    prompt: bytes | None = None
    # Ids of all tokens read since the last piece, where they are shown beside the text.
    ids: Sequence[int] = ()
    begins: bool = False  # whether nothing of its choice precedes it
    finish: str = ""  # OpenAI's finish reason, with the end of its choice
    stop_reason: StopReason = None
    number: int = 0  # of the candidate that it is all of
    mean_logprob: float = 0.0  # per token of that, where there are any


class OutputProcessor:
    """One choice as a `Run` reads it: what its entries bring is taken in pieces."""

    tokens = 0  # output tokens, as usage counts them, and where this reader stands in the log
    finish: str = ""  # OpenAI's finish reason; set once, by the ring or by a stop string that is found here
    stop_reason: StopReason = None
    logprob_sum = 0.0
    # Whether what `take` gives is the `texts` and nothing else, so that these may be taken instead.
    text_alone = False
    texts: list[str]  # what has become visible since they were taken last

    def feed(self, entry: TokenEntry) -> None:
        """Takes the next entry; what follows the end is ignored."""
        raise NotImplementedError

    def take(self) -> OutputDelta:
        """What has become visible since the last call."""
        raise NotImplementedError

    def whole(self, number: int) -> OutputDelta:
        """As `take`, of candidate `number` as far as it has come."""
        return self.take()._replace(
            finish=self.finish,
            stop_reason=self.stop_reason,
            number=number,
            mean_logprob=self.logprob_sum / max(1, self.tokens),
        )


def output_of(record: GenerationRecord, request: GenerationRequest, tokenizer: Tokenizer) -> "TextOutput":
    """The text of one choice as its record wants it, with what is not text taken out of it."""
    if record.parsing is None:
        return TextOutput(record, request, tokenizer)
    return ParsedOutput(record, request, tokenizer)


class TextOutput(OutputProcessor):
    """One choice's text."""

    def __init__(self, record: GenerationRecord, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        chat = record.endpoint != "completions"
        self._detokenizer = tokenizer.detokenizer(
            [] if chat and not record.continues else request.prompt,  # a chat's answer begins a text
            skip_special_tokens=record.skip_special_tokens,
            keep=markers_of(record.parsing),
        )
        self._record = record
        self._stops = StopStrings(record.stop, included=record.include_stop)
        self._min_tokens = request.sampling.min_tokens
        self._stop_token_ids = request.stop_token_ids
        self._logprobs = request.sampling.logprobs >= 0
        self._scored: list[ScoredToken] = []
        self._awaits_prompt = request.prompt_logprobs >= 0
        self._prompt: bytes | None = None
        # Whether a token that ends the text and is no part of it has its log probability shown all the same.
        self._score_end = record.echo and self._awaits_prompt
        self._ids: list[int] = []
        # Whether there is nothing but text to show.
        self._plain = not (record.stop or self._logprobs or self._awaits_prompt or record.token_ids)
        self.text_alone = self._plain
        self._decoded = 0  # characters decoded, those held back included
        self._shown = 0
        self.texts: list[str] = []

    def feed(self, entry: TokenEntry) -> None:
        tokens = entry.tokens
        if self.finish:
            return
        if self._plain and not entry.finish:
            self.tokens += len(tokens)
            self.texts.append(self._detokenizer.feed(tokens))
        else:
            self._feed_each(entry)

    def _feed_each(self, entry: TokenEntry) -> None:
        tokens = entry.tokens
        if self._awaits_prompt and (tokens or entry.finish):
            self._awaits_prompt, self._prompt = False, entry.prompt_scores
        scores = (entry.logprobs or []) if self._logprobs else []
        before = self.tokens
        for index, token in enumerate(tokens):
            self.tokens += 1
            if index < len(scores):
                self.logprob_sum += scores[index].logprob
            ends = index == len(tokens) - 1 and entry.finish == "stop" and token in self._stop_token_ids
            hidden = ends and not self._record.include_stop  # it ended the text and is no part of it
            if hidden and not self._score_end:
                break
            if index < len(scores):
                self._scored.append(ScoredToken(token, scores[index], self._decoded))
            if hidden:
                break
            self._show(self._detokenizer.feed([token]))
            if self._stops.matched:
                break
        if self._record.token_ids:
            self._ids += tokens[: self.tokens - before]
        self._end(entry)

    def _show(self, text: str) -> None:
        if not text:
            return
        self._decoded += len(text)
        shown = text if self.tokens < self._min_tokens else self._stops.feed(text)
        if shown:
            self.texts.append(shown)
            self._shown += len(shown)

    def _end(self, entry: TokenEntry) -> None:
        if entry.finish in ("stop", "length") and not self._stops.matched:
            if entry.finish == "stop" and entry.tokens and entry.tokens[-1] in self._record.stop_token_ids:
                self.stop_reason = entry.tokens[-1]
            self._show(self._detokenizer.flush())
            self.finish = entry.finish
        if self._stops.matched:
            self.finish, self.stop_reason = "stop", self._stops.matched
            self._scored = [scored for scored in self._scored if scored.offset < self._shown]
        elif self.finish:
            self.texts.append(self._stops.flush())

    def take(self) -> OutputDelta:
        text = "".join(self.texts)
        self.texts.clear()
        if self._plain:
            return OutputDelta(text, ())
        ready = len(self._scored)
        while not self.finish and ready and self._scored[ready - 1].offset >= self._shown:
            ready -= 1  # its text is held back, and may be cut
        scored, self._scored = self._scored[:ready], self._scored[ready:]
        prompt, self._prompt = self._prompt, None
        ids, self._ids = self._ids, []
        return OutputDelta(text, scored, prompt=prompt, ids=ids)


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
        self.matched = ""  # the one that has ended the text

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


class ParsedOutput(TextOutput):
    """One choice's text, reasoning and calls."""

    def __init__(self, record: GenerationRecord, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        super().__init__(record, request, tokenizer)
        assert record.parsing is not None, "something is to be taken out of the text"
        self._parsing = parsing = record.parsing
        family = FAMILIES.get(parsing.tools)
        self._parser = Parser(
            family.machine if family else None, parsing.types, thinking=parsing.reasoning, opened=parsing.opened
        )
        self._calls = CallNumbering(request.generation_id, single=parsing.single, custom=parsing.custom)
        self._events: list[Event] = []
        self.text_alone = False

    def feed(self, entry: TokenEntry) -> None:
        ended = bool(self.finish)
        super().feed(entry)
        self._events += self._parser.feed("".join(self.texts))
        self.texts.clear()
        if self.finish and not ended:
            self._events += self._parser.finish()

    def take(self) -> OutputDelta:
        """The finish reason is `tool_calls` where the model has stopped after a call of its own choice, as in OpenAI's
        API; `stop` where the function was demanded by its name."""
        events, self._events = self._events, []
        calls = self._calls.deltas(events)
        if self.finish == "stop" and self._calls.begun and not self._parsing.named:
            self.finish = "function_call" if self._parsing.legacy else "tool_calls"
        return (
            super()
            .take()
            ._replace(
                text="".join(event.text for event in events if isinstance(event, Text)),
                reasoning="".join(event.text for event in events if isinstance(event, Thought)),
                calls=calls,
            )
        )
