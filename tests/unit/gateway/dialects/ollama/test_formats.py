"""Ollama's lines: together they are the whole answer, and behind any position they go on; what is not told twice."""

import json
from itertools import pairwise
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.asgi import StreamChunk
from services.gateway.dialects.ollama.formats import OllamaChatFormat, OllamaGenerateFormat
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import RequestState, requests_of
from services.gateway.streams.cursor import END_OF_CHOICE
from services.gateway.streams.reading import Presentations
from shared.messages import FinishReason, GenerationRequest, SamplingParams, TokenEntry
from shared.messages.records import GenerationRecord, Parsing
from tests.unit.gateway.streams.test_resumed_reading import LIMITS, OF_BYTE, TOKENIZER, Alone, Reader

PRESENTATIONS = Presentations({"ollama.chat": OllamaChatFormat, "ollama.generate": OllamaGenerateFormat})

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
PIECES = st.sampled_from(
    [
        "Hi",
        " ",
        "ä",
        "</think>",
        "<tool_",
        CALL,
        CALL,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        CALL[:40],
        "END",
    ]
)
PARSING = Parsing("hermes", {"f": {"a": "array"}}, reasoning="think", opened=True)


def answer_of(endpoint: Literal["ollama.chat", "ollama.generate"], parsing: Parsing | None) -> RequestState:
    sampling = SamplingParams(logprobs=-1)
    request = GenerationRequest("i-0", "r", "m", "g", [5, 6], 4096, sampling=sampling, stop_token_ids=[1])
    record = GenerationRecord("i", endpoint, 0.0, [request], stop=["END"], stream=True, parsing=parsing)
    generations = [
        Generation(wire, index, LIMITS, now=0.0, started_at=0.0) for index, wire in enumerate(requests_of(record))
    ]
    return RequestState(record, generations, owner="g", owned=True, quiet_since=0.0, consumers=["g"])


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], FinishReason, list[int]]:
    """Tokens, how they end, and where entries are cut."""
    data = "".join(draw(st.lists(PIECES, max_size=5))).encode()
    data = data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=6))
    finish: FinishReason = draw(st.sampled_from(("stop", "length")))
    return [OF_BYTE[bytes([byte])] for byte in data], finish, sorted({0, *cuts, len(data)})


def entries(log: tuple[list[int], FinishReason, list[int]]) -> list[TokenEntry]:
    tokens, finish, cuts = log
    parts = [TokenEntry("i-0", 0, begin, tokens[begin:end]) for begin, end in pairwise(cuts)]
    return [*parts, TokenEntry("i-0", 0, len(tokens), [], finish)]


def said(chunks: list[StreamChunk]) -> tuple[str, str, list[Any], list[str]]:
    """Text, thoughts, calls and reasons of the end."""
    text, thoughts, calls, ends = "", "", list[Any](), list[str]()
    for chunk in chunks:
        line = json.loads(chunk.data)
        message = line.get("message") or {"content": line["response"], "thinking": line.get("thinking", "")}
        text += message["content"]
        thoughts += message.get("thinking", "")
        calls += message.get("tool_calls", ())
        ends += [line["done_reason"]] if line["done"] else []
        assert line["done"] == ("eval_count" in line)
    return text, thoughts, calls, ends


@settings(max_examples=150, deadline=None)
@given(
    logs(), st.sampled_from((("ollama.chat", PARSING), ("ollama.chat", None), ("ollama.generate", PARSING))), st.data()
)
def test_lines_are_the_answer_and_go_on_behind_every_position(
    log: tuple[list[int], FinishReason, list[int]], kind: tuple[Any, Parsing | None], data: st.DataObject
) -> None:
    answer = answer_of(*kind)
    first, chunks = Reader(answer, None), list[StreamChunk]()
    for entry in entries(log):
        answer.generations[0].on_entry("g", 1, entry, 0.0)
        chunks += first.news()
    told = said(chunks)
    run = PRESENTATIONS.run(answer, TOKENIZER, Alone())  # type: ignore[arg-type]
    run.join()
    whole = said([StreamChunk(run.snapshot(), b"")])
    assert told == whole
    assert len(told[3]) == 1
    for call in told[2]:
        assert call["function"]["name"] == "f"
        assert isinstance(call["function"]["arguments"], dict)
    at = data.draw(st.integers(0, len(chunks)), label="lines that the client has")
    position = int(chunks[at - 1].position) if at else 0
    rest = Reader(answer, [position]).news()
    both = said([*chunks[:at], *rest])
    assert both == told
    assert int(chunks[-1].position) == json.loads(chunks[-1].data)["eval_count"] + END_OF_CHOICE
