"""The events of a message are a function of its log, and come to the message, however it was cut."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.anthropic.message_reader import MessageEventReader
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.output import arguments_of
from services.gateway.streams.reading import Presentations
from shared.messages import FinishReason, GenerationRequest, TokenEntry
from shared.messages.records import GenerationRecord, Parsing
from tests.unit.gateway.streams.test_resumed_reading import LIMITS, LOOP, OF_BYTE, TOKENIZER

PRESENTATIONS = Presentations({"messages": MessageEventReader})

IDENTITY = "0" * 32
PARSING = Parsing(tools="hermes", types={"f": {}}, reasoning="think")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
FRAGMENTS = ["<think>", "</think>", CALL, CALL[:40], "Hi", " there", "\n", "<", "\u00e4\u00f6", "STOP", "x" * 20]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
cuts = st.lists(st.integers(0, 1000), max_size=6)


def answer_for(parsing: Parsing | None, *, stream: bool = True, capped: bool = False) -> RequestState:
    request = GenerationRequest(f"{IDENTITY}-0", "r", "m", "g", [5, 6], 4096, stop_token_ids=[1])
    record = GenerationRecord(
        IDENTITY, "messages", 0.0, [request], stream=stream, parsing=parsing, stop=["STOP"], capped=capped
    )
    generation = Generation(request, 0, LIMITS, now=0.0, started_at=0.0)
    return RequestState(record, [generation], owner="g", owned=True, quiet_since=0.0, consumers=["g"])


def feed(answer: RequestState, text: str, at: list[int], finish: FinishReason = "stop") -> RequestState:
    """`text`, a token a byte, cut into entries."""
    tokens = [OF_BYTE[bytes([byte])] for byte in text.encode()]
    ends = sorted({cut % (len(tokens) + 1) for cut in at} | {0, len(tokens)})
    for begin, end in itertools.pairwise(ends):
        put(answer, TokenEntry(f"{IDENTITY}-0", 0, begin, tokens[begin:end], cached_tokens=0 if begin else 1))
    put(answer, TokenEntry(f"{IDENTITY}-0", 0, len(tokens), [], finish=finish))
    return answer


def put(answer: RequestState, entry: TokenEntry) -> None:
    answer.generations[0].on_entry("ring", 1, entry, 1.0)


def events_of(answer: RequestState, after: list[int] | None = None) -> list[StreamChunk]:
    run = PRESENTATIONS.run(answer, TOKENIZER, None, after=after)
    run.join()

    async def chunks() -> list[StreamChunk]:
        return [chunk async for batch in run.chunks() for chunk in batch]

    return LOOP.run_until_complete(chunks())


def message_of(answer: RequestState) -> dict[str, Any]:
    run = PRESENTATIONS.run(answer, TOKENIZER, None)
    run.join()
    found: dict[str, Any] = json.loads(LOOP.run_until_complete(run.collect()))
    return found


def put_together(events: list[StreamChunk]) -> dict[str, Any]:
    """As clients do."""
    bodies = [json.loads(chunk.data) for chunk in events]
    assert [body["type"] for body in bodies] == [chunk.event.decode() for chunk in events]
    message: dict[str, Any] = bodies[0]["message"]
    partial = ""
    for body in bodies[1:]:
        match body["type"]:
            case "content_block_start":
                assert body["index"] == len(message["content"])
                message["content"].append(body["content_block"])
                partial = ""
            case "content_block_delta":
                block, delta = message["content"][body["index"]], body["delta"]
                if delta["type"] == "input_json_delta":
                    partial += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                block = message["content"][body["index"]]
                if block["type"] == "tool_use":
                    block["input"] = arguments_of(partial) or {}
            case "message_delta":
                message |= body["delta"]
                message["usage"] |= body["usage"]
    assert bodies[-1] == {"type": "message_stop"}
    return message


@settings(max_examples=80)
@given(texts, cuts, cuts, st.booleans(), st.lists(st.integers(0, 1000), max_size=3))
def test_any_cut_and_any_place_to_go_on_from_give_the_same_message(
    text: str, one: list[int], two: list[int], parsed: bool, places: list[int]
) -> None:
    parsing = PARSING if parsed else None
    events = events_of(feed(answer_for(parsing), text, one))
    other = feed(answer_for(parsing), text, two)
    assert events_of(other) == events
    assert [int(chunk.position) for chunk in events] == list(range(len(events)))
    for number in {place % len(events) for place in places}:
        assert events_of(other, [number]) == events[number + 1 :]
    whole = message_of(feed(answer_for(parsing, stream=False), text, two))
    assert put_together(events) == whole
    run = PRESENTATIONS.run(other, TOKENIZER, None)
    run.join()
    assert json.loads(run.snapshot()) == whole
    assert run.position == str(len(events) - 1)
    with pytest.raises(InvalidParameter, match=f"which has {len(events)} events"):
        events_of(other, [len(events)])


@pytest.mark.parametrize(
    ("text", "finish", "capped", "expected"),
    [
        ("Hi", "stop", False, ("end_turn", None)),
        ("Hi", "length", False, ("max_tokens", None)),
        ("Hi", "length", True, ("model_context_window_exceeded", None)),
        ("Hi STOP", "stop", False, ("stop_sequence", "STOP")),
        (CALL, "stop", False, ("tool_use", None)),
        (CALL[:50], "length", False, ("max_tokens", None)),
        ("", "stop", False, ("end_turn", None)),
    ],
)
def test_why_it_ended(text: str, finish: FinishReason, capped: bool, expected: tuple[str, str | None]) -> None:
    answer = feed(answer_for(PARSING, capped=capped), text, [], finish)
    message = put_together(events_of(answer))
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["usage"]["cache_read_input_tokens"] == (1 if text else 0)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 2


def test_an_answer_that_goes_on_is_shown_as_far_as_it_has_come() -> None:
    answer = answer_for(PARSING)
    run = PRESENTATIONS.run(answer, TOKENIZER, None)
    run.join()
    assert (json.loads(run.snapshot())["content"], run.position) == ([], "")
    put(answer, TokenEntry(f"{IDENTITY}-0", 0, 0, [OF_BYTE[bytes([byte])] for byte in b"<think>Hm"]))
    shown = json.loads(run.snapshot())
    assert shown["content"] == [{"type": "thinking", "thinking": "Hm", "signature": ""}]
    assert shown["stop_reason"] is None
    assert not run.finished


def test_tokens_of_the_thinking_are_counted() -> None:
    message = message_of(feed(answer_for(PARSING), "<think>Hm</think>Yes", []))
    thinking = message["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < thinking < message["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", {}), ('{"a": 1}', {"a": 1}), ('{"a"', None), ("[" * 5000, None), ("[1]", [1])]
)
def test_arguments_of_a_call(arguments: str, shown: Any) -> None:
    assert arguments_of(arguments) == shown
    assert msgspec.json.encode(shown)
