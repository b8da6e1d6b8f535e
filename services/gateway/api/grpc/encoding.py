"""Answers as protobuf messages, put together from prepared pieces.

A `GenerationEvent` is made of its fields one behind the other, in any order and number (protobuf encoding,
"Message structure"), so each chunk of a `Run` is an encoded `choices` field, and all that come at the same
time are one message. That is a few concatenations; the generated classes would build objects first.
A property test holds these bytes against the generated classes.
"""

import base64
from collections.abc import Iterator, Sequence

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.core.asgi import StreamChunk
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.embeddings import vector_outputs
from services.gateway.streams.formats import EchoFormat, ResponseSerializer, Usage
from services.gateway.streams.output import OutputDelta, OutputProcessor, ScoredToken, output_of
from services.gateway.streams.progress import PromptProgress
from services.gateway.streams.prompt_logprobs import PromptList
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.parser import CallDelta
from shared.messages import GenerationRequest, TokenEntry
from shared.messages.records import GenerationRecord

# ChoiceDelta.finish_reason, encoded.
_FINISH = {"stop": b"\x20\x01", "length": b"\x20\x02", "tool_calls": b"\x20\x03", "function_call": b"\x20\x04"}


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


def event(head: bytes, chunks: Sequence[StreamChunk]) -> bytes:
    """The `GenerationEvent` of chunks that came at the same time. `head`: of the first one, the generation's id."""
    position = chunks[-1].position
    data = chunks[0].data if len(chunks) == 1 else b"".join([chunk.data for chunk in chunks])
    if not position:  # of progress alone
        return head + data
    if len(position) < 128:
        return b"%b%b\x12%c%b" % (head, data, len(position), position)
    return head + data + field(2, position)


def id_field(answer: RequestState) -> bytes:
    """GenerationEvent.id, encoded."""
    return field(1, answer.public_id.encode())


class EventFormat(ResponseSerializer):
    """Chunks are parts of `GenerationEvent`s; `event` makes messages of them."""

    def __init__(
        self, answer: RequestState, tokenizer: Tokenizer, *, tokens: bool = False, progress: bool = False
    ) -> None:
        """`tokens`: token ids instead of text. `progress`: whether it tells how much of the prompts is computed."""
        record = answer.record
        make = TokenOutput if tokens else output_of
        super().__init__([make(record, item.request, tokenizer) for item in answer.generations])
        self._prompts = PromptList(answer, tokenizer) if record.prompt_logprobs >= 0 else None
        self._id = id_field(answer)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._tells_progress = progress

    def progress(self, progress: PromptProgress) -> bytes | None:
        if not self._tells_progress:
            return None
        told = pb.PromptProgress(
            total=progress.total, cached=progress.cache, processed=progress.processed, milliseconds=progress.time_ms
        )
        return field(6, told.SerializeToString())

    def delta(self, index: int, piece: OutputDelta) -> bytes:
        return field(3, self._delta(index, piece))

    def last(self, index: int, piece: OutputDelta) -> bytes:
        return field(3, self._delta(index, piece) + _FINISH[piece.finish])

    def usage(self, usage: Usage) -> bytes:
        cached = usage.prompt_tokens_details["cached_tokens"]
        told = b"\x08%b\x10%b\x18%b" % (varint(usage.prompt_tokens), varint(usage.completion_tokens), varint(cached))
        if any(sparse := usage.sparse):
            told += b"\x20%b\x28%b" % (varint(sparse.prompt), varint(sparse.output))
        return field(4, told)

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        deltas = [
            self.last(index, piece if piece.finish else piece._replace(finish="stop"))
            for index, piece in enumerate(choices)
        ]
        return b"".join((self._id, *deltas, self.usage(usage), *self._prompt(choices[0])))

    def _prompt(self, choice: OutputDelta) -> Iterator[bytes]:
        """One prompt has all choices."""
        if self._prompts is None:
            return
        of = self._tokenizer.token_bytes
        for token, row in self._prompts.rows(choice.number, choice.prompt or b""):
            shown = pb.PromptTokenLogprob(token_id=token, token=of(token), logprob=row.logprob, rank=row.rank)
            for other, logprob in row.top:
                shown.top.add(token_id=other, token=of(other), logprob=logprob)
            yield field(5, shown.SerializeToString())

    def _delta(self, index: int, piece: OutputDelta) -> bytes:
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
                pb.TopLogprob(token_id=token, token=of(token), logprob=logprob) for token, logprob in scored.known.top
            ],
        )


def _call(call: CallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


class EmbedFormat(ResponseSerializer):
    """An `EmbedResponse`. On its way a vector is base64 of float32, little-endian: protobuf's own bytes."""

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        super().__init__(vector_outputs(answer))

    def usage(self, usage: Usage) -> bytes:
        return field(2, pb.Usage(prompt_tokens=usage.prompt_tokens).SerializeToString())

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        vectors = [field(1, field(1, base64.b64decode(choice.text))) for choice in choices]
        return b"".join((*vectors, self.usage(usage)))


def event_format(
    answer: RequestState, tokenizer: Tokenizer, *, tokens: bool = False, progress: bool = False
) -> ResponseSerializer:
    """An answer as `GenerationEvent`s, whichever API began it; otherwise as `EventFormat`."""
    shape = EventFormat(answer, tokenizer, tokens=tokens, progress=progress)
    shown = not tokens and (answer.record.best or answer.record.echo)
    return EchoFormat(shape, answer, tokenizer) if shown else shape


class TokenOutput(OutputProcessor):
    """One choice's output as token ids. Text is only made where stop strings have to be found in it."""

    def __init__(self, record: GenerationRecord, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._awaits_prompt = record.prompt_logprobs >= 0
        self._prompt: bytes | None = None
        self._text = output_of(record, request, tokenizer) if record.stop else None
        self._logprobs = request.sampling.logprobs >= 0
        self._ids: list[int] = []
        self._scored: list[ScoredToken] = []

    def feed(self, entry: TokenEntry) -> None:
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
            pairs = zip(entry.tokens[:count], entry.logprobs, strict=False)
            self._scored += (ScoredToken(token, logprobs, 0) for token, logprobs in pairs)
        self.tokens += count
        if finish in _FINISH:
            self.finish = finish

    def take(self) -> OutputDelta:
        ids, self._ids = self._ids, []
        scored, self._scored = self._scored, []
        prompt, self._prompt = self._prompt, None
        return OutputDelta("", scored, tokens=ids, prompt=prompt)
