"""The hand-made encoder against protobuf's own classes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.grpc.encoding import EventFormat, TokenOutput, event, field, id_field, varint
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.core.asgi import StreamChunk
from services.gateway.streams.formats import Usage
from services.gateway.streams.output import OutputDelta, ScoredToken
from services.gateway.streams.progress import PromptProgress
from services.gateway.tokenizer.tokenizer import StubTokenizer
from services.gateway.tool_calls.parser import CallDelta
from shared.messages import FinishReason, GenerationRequest, SamplingParams, TokenEntry, TokenLogprobs
from shared.messages.records import GenerationRecord
from tests.unit.gateway.streams.test_resumed_reading import answer_of

TOKENS = st.integers(0, 2**31)
PRINTABLE = st.characters(exclude_categories=("C", "Zl", "Zp", "Zs"), include_characters=" ")
TEXTS = st.text(PRINTABLE, max_size=300)
SCORES = st.floats(allow_nan=False, width=32)
FINISHES = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "function_call": pb.FINISH_REASON_FUNCTION_CALL,
}


@st.composite
def scored(draw: st.DrawFn) -> ScoredToken:
    top = draw(st.lists(st.tuples(TOKENS, SCORES), max_size=3))
    return ScoredToken(draw(TOKENS), TokenLogprobs(draw(SCORES), top), 0)


CALLS = st.lists(st.builds(CallDelta, st.integers(0, 9), TEXTS, TEXTS, TEXTS), max_size=2)
PIECES = st.builds(OutputDelta, TEXTS, st.lists(scored(), max_size=2), TEXTS, CALLS, st.lists(TOKENS, max_size=5))
PARTS = st.lists(st.tuples(st.integers(0, 200), PIECES, st.sampled_from(["", *FINISHES])), min_size=1)
USAGES = st.none() | st.builds(Usage.of, st.integers(0, 2**20), st.integers(0, 2**20), st.integers(0, 2**20))
POSITIONS = st.lists(st.integers(0, 2**20), min_size=1, max_size=60)


def expected(parts: Any, usage: Usage | None, position: str, identity: str, *, tokens: bool) -> pb.GenerationEvent:
    found = pb.GenerationEvent(id=identity, position=position)
    of = StubTokenizer().token_bytes
    for index, piece, finish in parts:
        delta = found.choices.add(index=index, finish_reason=FINISHES.get(finish))
        if tokens:
            delta.token_ids.extend(piece.tokens)
        else:
            delta.text = piece.text
        delta.reasoning = piece.reasoning
        for call in piece.calls:
            delta.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
        for token, logprobs, _ in piece.scored:
            shown = delta.logprobs.add(token_id=token, token=of(token), logprob=logprobs.logprob)
            for other, logprob in logprobs.top:
                shown.top.add(token_id=other, token=of(other), logprob=logprob)
    if usage is not None:
        found.usage.CopyFrom(_usage(usage))
    return found


def _usage(usage: Usage) -> pb.Usage:
    cached = usage.prompt_tokens_details["cached_tokens"]
    return pb.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cached_tokens=cached)


@given(PARTS, USAGES, POSITIONS, st.booleans())
def test_events_are_what_the_generated_classes_would_say(
    parts: Any, usage: Usage | None, positions: list[int], tokens: bool
) -> None:
    answer = answer_of([], 1, -1)
    shape = EventFormat(answer, StubTokenizer(), tokens=tokens)
    position = ",".join(map(str, positions))
    chunks = [
        StreamChunk(
            shape.last(index, piece._replace(finish=finish)) if finish else shape.delta(index, piece), position.encode()
        )
        for index, piece, finish in parts
    ]
    if usage is not None:
        chunks.append(StreamChunk(shape.usage(usage), position.encode()))
    first = pb.GenerationEvent.FromString(event(id_field(answer), chunks))
    assert first == expected(parts, usage, position, answer.public_id, tokens=tokens)
    again = pb.GenerationEvent.FromString(event(b"", chunks))
    assert again == expected(parts, usage, position, "", tokens=tokens)


@given(st.builds(PromptProgress, *[st.integers(0, 2**31)] * 4), POSITIONS)
def test_progress_for_those_who_ask_for_it(progress: PromptProgress, positions: list[int]) -> None:
    answer = answer_of([], 1, -1)
    assert EventFormat(answer, StubTokenizer()).progress(progress) is None
    shape = EventFormat(answer, StubTokenizer(), progress=True)
    told = shape.progress(progress)
    assert told is not None
    wanted = pb.PromptProgress(
        total=progress.total, cached=progress.cache, processed=progress.processed, milliseconds=progress.time_ms
    )
    alone = pb.GenerationEvent.FromString(event(b"", [StreamChunk(told, b"")]))
    assert alone == pb.GenerationEvent(prompt_progress=wanted)
    position = ",".join(map(str, positions))
    beside = StreamChunk(shape.delta(0, OutputDelta("Hi", ())), position.encode())
    both = pb.GenerationEvent.FromString(event(b"", [StreamChunk(told, b""), beside]))
    assert (both.prompt_progress, both.position, both.choices[0].text) == (wanted, position, "Hi")


@given(st.lists(st.tuples(PIECES, st.sampled_from([*FINISHES])), min_size=1, max_size=4))
def test_whole_answers(choices: list[tuple[OutputDelta, Any]]) -> None:
    answer = answer_of([], 1, -1)
    shape = EventFormat(answer, StubTokenizer())
    usage = Usage.of(3, 200, 1)
    shown = shape.whole([piece._replace(finish=finish) for piece, finish in choices], usage)
    parts = [(index, piece, finish) for index, (piece, finish) in enumerate(choices)]
    assert pb.GenerationEvent.FromString(shown) == expected(parts, usage, "", answer.public_id, tokens=False)


@given(st.integers(1, 2000), st.binary(max_size=400))
def test_fields_of_any_number_and_length(number: int, data: bytes) -> None:
    assert field(number, data) == varint(number << 3 | 2) + varint(len(data)) + data


def entry(tokens: bytes, finish: Any = "", scores: list[TokenLogprobs] | None = None) -> TokenEntry:
    return TokenEntry("g", 0, 0, list(tokens), finish, scores)


def token_output(*stops: str, logprobs: bool = False) -> TokenOutput:
    request = GenerationRequest("i-0", "r", "m", "g", [5], 64, SamplingParams(logprobs=0 if logprobs else -1), [0])
    record = GenerationRecord("i", "chat.completions", 0.0, [request], stop=list(stops))
    return TokenOutput(record, request, StubTokenizer())


def test_tokens_come_as_they_are_the_last_one_too() -> None:
    output = token_output(logprobs=True)
    output.feed(entry(b"ab", scores=[TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, [])]))
    first = output.take()
    assert (first.tokens, [item.token for item in first.scored]) == ([97, 98], [97, 98])
    output.feed(entry(b"c\0", "stop"))
    output.feed(entry(b"nothing more"))
    assert (output.take().tokens, output.tokens, output.finish) == ([99, 0], 4, "stop")


@pytest.mark.parametrize(("more", "whole", "finish"), [(b"def", b"abcd", "stop"), (b"x", b"abcx", "length")])
def test_tokens_end_with_the_one_that_completes_a_stop_string(more: bytes, whole: bytes, finish: FinishReason) -> None:
    output = token_output("cd")
    output.feed(entry(b"abc"))
    output.feed(entry(more, "length"))
    assert (bytes(output.take().tokens), output.tokens, output.finish) == (whole, 4, finish)
