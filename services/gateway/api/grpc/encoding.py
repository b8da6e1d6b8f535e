"""Answers as protobuf messages, put together from prepared pieces.

A `GenerationEvent` is made of its fields one behind the other, in any order and number (protobuf encoding,
"Message structure"), so each chunk of a `Run` is an encoded `choices` field, and all that come at the same
time are one message. That is a few concatenations; the generated classes would build objects first.
A property test holds these bytes against the generated classes.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.streams.formats import Choice, Usage
from services.gateway.streams.output import Output, Piece, ScoredToken
from services.gateway.streams.prompt_logprobs import PromptList
from services.gateway.streams.run import Chunk
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.parser import CallDelta
from shared.messages import TokenEntry

_FINISH = {
    "stop": b"\x20\x01",
    "length": b"\x20\x02",
    "tool_calls": b"\x20\x03",
    "function_call": b"\x20\x04",
}
"""ChoiceDelta.finish_reason, encoded."""


def varint(value: int) -> bytes:
    """An unsigned integer in groups of 7 bits."""
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, data: bytes) -> bytes:
    """A field with a length: text, bytes, a message."""
    size = len(data)
    if size < 128 and number < 16:
        return bytes((number << 3 | 2, size)) + data
    return varint(number << 3 | 2) + varint(size) + data


class EventFormat:
    """Chunks are parts of `GenerationEvent`s; `event` makes messages of them."""

    def __init__(
        self, public_id: str, tokenizer: Tokenizer, *, tokens: bool, prompts: PromptList | None = None
    ) -> None:
        """`tokens`: token ids instead of text; `prompts`: where log probabilities of the prompt are shown."""
        self._prompts = prompts
        self._head = field(1, public_id.encode())
        self._tokenizer = tokenizer
        self._tokens = tokens

    def event(self, chunks: Sequence[Chunk]) -> bytes:
        """The message of chunks that came at the same time; the first one has the generation's id."""
        head, self._head = self._head, b""
        position = chunks[-1].position
        if len(chunks) == 1:
            return (
                b"%b%b\x12%c%b" % (head, chunks[0].data, len(position), position)
                if len(position) < 128
                else (head + chunks[0].data + field(2, position))
            )
        return b"".join((head, *[chunk.data for chunk in chunks], field(2, position)))

    def first(self, index: int) -> bytes | None:
        return None

    def delta(self, index: int, piece: Piece) -> bytes:
        return field(3, self._delta(index, piece))

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        return field(3, self._delta(index, piece) + _FINISH[finish_reason])

    def usage(self, usage: Usage) -> bytes:
        cached = usage.prompt_tokens_details["cached_tokens"]
        return field(
            4,
            b"\x08%b\x10%b\x18%b"
            % (varint(usage.prompt_tokens), varint(usage.completion_tokens), varint(cached)),
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        head, self._head = self._head, b""
        deltas = [
            self.last(index, choice.finish_reason or "stop", _piece_of(choice))
            for index, choice in enumerate(choices)
        ]
        return b"".join((head, *deltas, self.usage(usage), *self._prompt(choices[0])))

    def _prompt(self, choice: Choice) -> Iterator[bytes]:
        """One prompt has all choices."""
        if self._prompts is None:
            return
        of = self._tokenizer.token_bytes
        for token, row in self._prompts.rows(choice.number, choice.prompt):
            shown = pb.PromptTokenLogprob(token_id=token, token=of(token), logprob=row.logprob, rank=row.rank)
            for other, logprob in row.top:
                shown.top.add(token_id=other, token=of(other), logprob=logprob)
            yield field(5, shown.SerializeToString())

    def _delta(self, index: int, piece: Piece) -> bytes:
        data = b"\x08" + varint(index) if index else b""
        if self._tokens:
            if piece.tokens:
                data += field(3, b"".join(map(varint, piece.tokens)))
        elif piece.text:
            data += field(2, piece.text.encode())
        if piece.reasoning:
            data += field(6, piece.reasoning.encode())
        if piece.calls:
            data += b"".join(field(7, _call(call).SerializeToString()) for call in piece.calls)
        if piece.scored:
            scored = (self._scored(token) for token in piece.scored if token.logprobs is not None)
            data += b"".join(field(5, token.SerializeToString()) for token in scored)
        return data

    def _scored(self, scored: ScoredToken) -> pb.TokenLogprob:
        of = self._tokenizer.token_bytes
        return pb.TokenLogprob(
            token_id=scored.token,
            token=of(scored.token),
            logprob=scored.known.logprob,
            top=[
                pb.TopLogprob(token_id=token, token=of(token), logprob=logprob)
                for token, logprob in scored.known.top
            ],
        )


def _piece_of(choice: Choice) -> Piece:
    return Piece(choice.text, choice.scored, choice.reasoning, choice.calls, choice.tokens)


def _call(call: CallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


class EmbedFormat:
    """An `EmbedResponse`. On its way a vector is base64 of float32, little-endian: protobuf's own bytes."""

    def first(self, index: int) -> bytes | None:
        raise NotImplementedError

    def delta(self, index: int, piece: Piece) -> bytes:
        raise NotImplementedError

    def last(self, index: int, finish_reason: str, piece: Piece) -> bytes:
        raise NotImplementedError

    def usage(self, usage: Usage) -> bytes:
        return field(2, pb.Usage(prompt_tokens=usage.prompt_tokens).SerializeToString())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        vectors = [field(1, field(1, base64.b64decode(choice.text))) for choice in choices]
        return b"".join((*vectors, self.usage(usage)))


class TokenOutput:
    """One choice's output as token ids. Text is only made where stop strings have to be found in it."""

    def __init__(self, text: Output | None, *, logprobs: bool, prompt_scores: bool = False) -> None:
        """`text`: finds the stop strings; None where there are none. `prompt_scores`: whether those are shown."""
        self._awaits_prompt = prompt_scores
        self._prompt: bytes | None = None
        self._text = text
        self._logprobs = logprobs
        self._ids: list[int] = []
        self._scored: list[ScoredToken] = []
        self.tokens = 0
        """Output tokens, as usage counts them, and where this reader stands in the log."""
        self.finish = ""
        self.stop_reason = None
        self.mean_logprob = 0.0
        """No answer of best_of is shown as tokens."""

    def feed(self, entry: TokenEntry) -> None:
        """Takes the next entry; what follows the token that completes a stop string is ignored."""
        if self.finish:
            return
        finish: str = entry.finish
        if self._awaits_prompt and entry.prompt_scores:
            self._awaits_prompt, self._prompt = False, entry.prompt_scores
        count = len(entry.tokens)
        if self._text is not None:
            self._text.feed(entry)
            self._text.take()
            count, finish = self._text.tokens - self.tokens, self._text.finish
        self._ids += entry.tokens[:count]
        if self._logprobs and entry.logprobs:
            self._scored += _scored(entry, count)
        self.tokens += count
        if finish in _FINISH:
            self.finish = finish

    def take(self) -> Piece:
        """What has come since the last call."""
        ids, self._ids = self._ids, []
        scored, self._scored = self._scored, []
        prompt, self._prompt = self._prompt, None
        return Piece("", scored, tokens=ids, prompt=prompt)


def _scored(entry: TokenEntry, count: int) -> Iterable[ScoredToken]:
    pairs = zip(entry.tokens[:count], entry.logprobs or (), strict=False)
    return (ScoredToken(token, logprobs, 0) for token, logprobs in pairs)
