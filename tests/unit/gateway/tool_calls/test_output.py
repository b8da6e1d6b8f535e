"""From tokens to deltas: what clients see, from the beginning and from any place within a call."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams import cursor
from services.gateway.streams.reading import Presentations
from services.gateway.tool_calls.parser import call_id
from shared.messages import FinishReason, GenerationRequest, SamplingParams, TokenEntry, TokenLogprobs
from shared.messages.records import GenerationRecord, Parsing
from shared.nats.bus import encode
from tests.unit.gateway.streams.test_resumed_reading import OF_BYTE, TOKENIZER, Alone, Reader, answer_of
from tests.unit.gateway.tool_calls.texts import CASES, NOW, TYPES, WEATHER, Case

PRESENTATIONS = Presentations()

THINKING = "<think>\nHm, \u2603.\n</think>\n"


def calling(parsing: Parsing, *, choices: int = 1, logprobs: int = -1, stop: list[str] | None = None) -> RequestState:
    answer = answer_of(stop or [], choices, logprobs)
    answer.record = msgspec.structs.replace(answer.record, parsing=parsing)
    for generation in answer.generations:
        generation.request = msgspec.structs.replace(generation.request, max_tokens=4096)
    return answer


def entries(text: str, cuts: list[int], finish: FinishReason = "stop", index: int = 0) -> list[TokenEntry]:
    tokens = [OF_BYTE[bytes([byte])] for byte in text.encode()]
    bounds = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    found = [
        TokenEntry(f"i-{index}", 0, start, tokens[start:end], logprobs=[TokenLogprobs(-1.0) for _ in tokens[start:end]])
        for start, end in itertools.pairwise(bounds)
    ]
    return [*found, TokenEntry(f"i-{index}", 0, len(tokens), [], finish=finish)]


def read(
    answer: RequestState, log: list[TokenEntry], after: list[int] | None = None
) -> list[tuple[dict[str, Any], str]]:
    """Chunks with their positions."""
    reader = Reader(answer, after)
    found = []
    for entry in log:
        answer.generations[int(entry.generation_id[2:])].on_entry("ring", 1, entry, 1.0)
        found += reader.news()
    return [(json.loads(chunk.data), chunk.position.decode()) for chunk in found]


def joined(chunks: list[tuple[dict[str, Any], str]], choice: int = 0) -> dict[str, Any]:
    """What a client puts together of a choice's chunks."""
    message: dict[str, Any] = {"content": None, "reasoning_content": "", "calls": {}, "finish": None, "scored": 0}
    for chunk, _ in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] not in message["calls"]
                    assert call["type"] == "function"
                    message["calls"][call["index"]] = {
                        "id": call["id"],
                        "name": call["function"]["name"],
                        "arguments": "",
                    }
                message["calls"].setdefault(call["index"], {"arguments": ""})["arguments"] += call["function"][
                    "arguments"
                ]
            message["finish"] = part["finish_reason"] or message["finish"]
            message["scored"] += len((part["logprobs"] or {"content": ()})["content"])
    return message


@settings(max_examples=60)
@given(st.sampled_from([case for case in CASES if len(case.calls) > 0]), st.booleans(), st.data())
def test_every_event_within_a_call_is_a_place_to_go_on_from(case: Case, thinking: bool, data: st.DataObject) -> None:
    """Chunks up to any event and those behind it, read anew, are what one reader gets in all."""
    parsing = Parsing(tools=case.family, types=TYPES, reasoning="think" if thinking else "")
    text = (THINKING if thinking else "") + case.text
    cuts = st.lists(st.integers(0, len(text.encode())), max_size=12)
    log = entries(text, data.draw(cuts))
    whole = read(calling(parsing, logprobs=0), log)
    once = joined(whole)
    assert tuple((call["name"], call["arguments"]) for call in once["calls"].values()) == case.calls
    assert (once["content"] or "") == case.content
    assert once["reasoning_content"] == ("Hm, \u2603." if thinking else "")
    assert once["finish"] == "tool_calls"
    at = data.draw(st.integers(0, len(whole) - 1))
    other = entries(text, data.draw(cuts))
    rest = read(calling(parsing, logprobs=0), other, cursor.parse(whole[at][1]))
    usage = [chunk for chunk in whole[: at + 1] if chunk[0]["choices"]]
    assert joined([*usage, *rest]) == once


def test_openais_chunks() -> None:
    """The first part of a call has its id, type and name, the others its arguments alone."""
    text = 'Well.<tool_call>{"name": "f", "arguments": {"b": "x"}}</tool_call>'
    log = entries(text, list(range(len(text))))
    chunks = read(calling(Parsing(tools="hermes", types=TYPES)), log)
    deltas = [chunk["choices"][0]["delta"] for chunk, _ in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert [delta["content"] for delta in deltas[1:6]] == list("Well.")
    begin = {"name": "f", "arguments": ""}
    assert deltas[6] == {"tool_calls": [{"index": 0, "id": call_id("i-0", 0), "type": "function", "function": begin}]}
    assert deltas[7] == {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    assert deltas[-1] == {}


def collected(answer: RequestState, log: list[TokenEntry]) -> dict[str, Any]:
    """The whole response."""
    run = PRESENTATIONS.run(answer, TOKENIZER, Alone())  # type: ignore[arg-type]
    run.join()
    for entry in log:
        answer.generations[int(entry.generation_id[2:])].on_entry("ring", 1, entry, 1.0)
    found: dict[str, Any] = json.loads(run.snapshot())
    assert run.finished
    return found


def test_a_whole_response() -> None:
    text = next(case.text for case in CASES if case.calls == (WEATHER, NOW) and case.family == "glm4")
    answer = calling(Parsing(tools="glm4", types=TYPES, reasoning="think"), choices=2, logprobs=0)
    log = entries(THINKING + text, [5]) + entries("No.", [1], index=1)
    first, second = collected(answer, log)["choices"]
    assert first["message"]["reasoning_content"] == "Hm, \u2603."
    assert first["message"]["content"] == "Well."
    assert [call["id"] for call in first["message"]["tool_calls"]] == [call_id("i-0", 0), call_id("i-0", 1)]
    assert [call["function"]["name"] for call in first["message"]["tool_calls"]] == ["get_weather", "now"]
    assert first["finish_reason"] == "tool_calls"
    assert len(first["logprobs"]["content"]) == len((THINKING + text).encode())
    assert second["message"] == {"role": "assistant", "content": "No.", "refusal": None}
    assert second["finish_reason"] == "stop"


HERMES = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("parsing", "text", "finish", "calls", "reason"),
    [
        (Parsing(tools="hermes"), HERMES * 2, "stop", 2, "tool_calls"),
        (Parsing(tools="hermes", single=True), HERMES * 2, "stop", 1, "tool_calls"),
        (Parsing(tools="hermes", named=True), HERMES, "stop", 1, "stop"),
        (Parsing(tools="hermes"), HERMES[:-14], "length", 1, "length"),
        (Parsing(tools="hermes"), "No.", "stop", 0, "stop"),
    ],
)
def test_finish_reasons(parsing: Parsing, text: str, finish: FinishReason, calls: int, reason: str) -> None:
    (choice,) = collected(calling(parsing), entries(text, [], finish))["choices"]
    assert len(choice["message"].get("tool_calls", ())) == calls
    assert choice["finish_reason"] == reason
    assert choice["message"]["content"] == (None if calls else "No.")


def test_function_call_of_old() -> None:
    parsing = Parsing(tools="hermes", single=True, legacy=True)
    (choice,) = collected(calling(parsing), entries(HERMES, []))["choices"]
    assert choice["message"]["function_call"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "function_call"
    chunks = read(calling(parsing), entries(HERMES, list(range(60))))
    calls = [chunk["choices"][0]["delta"].get("function_call") for chunk, _ in chunks if chunk["choices"]]
    assert [call for call in calls if call] == [
        {"name": "now", "arguments": ""},
        {"arguments": "{"},
        {"arguments": "}"},
    ]


def test_a_stop_string_within_a_call_ends_it() -> None:
    answer = calling(Parsing(tools="hermes"), stop=["name"])
    (choice,) = collected(answer, entries(HERMES, []))["choices"]
    assert choice["message"]["content"] == '<tool_call>{"'
    assert choice["finish_reason"] == "stop"


def test_ids_are_of_the_generation_the_choice_and_the_call() -> None:
    ids = {call_id(generation, index) for generation in ("a-0", "a-1", "b-0") for index in range(3)}
    assert len(ids) == 9
    assert call_id("a-0", 1) == call_id("a-0", 1)
    assert all(len(identity) == 29 for identity in ids)


def test_the_record_has_what_it_takes_to_show_the_answer_again() -> None:
    parsing = Parsing(tools="hermes", types=TYPES, single=True, reasoning="think", opened=True)
    request = GenerationRequest("i-0", "r", "m", "g", [5], 6, sampling=SamplingParams())
    record = GenerationRecord("i", "chat.completions", 0.0, [request], parsing=parsing)
    assert msgspec.msgpack.decode(encode(record), type=GenerationRecord) == record
