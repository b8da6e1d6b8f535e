"""The events of a response are a function of its log: however it was cut, and wherever a reader begins."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.responses.conversation import compaction
from services.gateway.dialects.responses.stream.reader import ResponseEventReader
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.persistence.keeper import answer_of, stored_of
from services.gateway.streams.reading import Presentations
from services.gateway.streams.stream_reader import StreamReader
from shared.errors import RingLost, Unavailable
from shared.messages import FinishReason, GenerationRequest, SamplingParams, TokenEntry, TokenLogprobs
from shared.messages.records import GenerationRecord, Parsing, ResponseRecord, StoredResponse
from tests.unit.gateway.streams.test_resumed_reading import LIMITS, LOOP, OF_BYTE, TOKENIZER, entries_of, logs

PRESENTATIONS = Presentations({"responses": ResponseEventReader})

Log = tuple[list[int], FinishReason, list[int]]
IDENTITY = "0" * 32


def answer_for(
    *,
    background: bool = False,
    logprobs: int = -1,
    parsing: Parsing | None = None,
    compacts: bool = False,
    prewarm: bool = False,
) -> RequestState:
    request = GenerationRequest(
        f"{IDENTITY}-0", "r", "m", "g", [5, 6], 64, sampling=SamplingParams(logprobs=logprobs), stop_token_ids=[1]
    )
    shown = msgspec.json.encode({"background": background, "instructions": None})
    record = GenerationRecord(
        IDENTITY,
        "responses",
        0.0,
        [request],
        stream=True,
        parsing=parsing,
        response=ResponseRecord(shown, b"[]", background=background, compacts=compacts, prewarm=prewarm),
    )
    generation = Generation(request, 0, LIMITS, now=0.0, started_at=0.0)
    return RequestState(record, [generation], owner="g", owned=True, quiet_since=0.0, consumers=["g"])


def feed(answer: RequestState, log: Log, scored: bool) -> None:
    for entry in entries_of(0, log, scored):
        moved = msgspec.structs.replace(entry, generation_id=f"{IDENTITY}-0")
        answer.generations[0].on_entry("ring", 1, moved, 1.0)


def read(answer: RequestState, after: list[int] | None = None) -> list[StreamChunk]:
    """All events that there are, of an answer that has ended."""
    run: StreamReader = PRESENTATIONS.run(answer, TOKENIZER, None, after=after)
    run.join()

    async def chunks() -> list[StreamChunk]:
        return [chunk async for batch in run.chunks() for chunk in batch]

    return LOOP.run_until_complete(chunks())


def recut(log: Log, cuts: list[int], alone: bool) -> Log:
    """The same log in other pieces; `alone`: its end comes in a piece of its own."""
    tokens, finish, _ = log
    inside = sorted(cut % (len(tokens) + 1) for cut in cuts)
    return tokens, finish, [*inside, len(tokens)] if alone else inside


@settings(max_examples=60)
@given(
    logs(),
    st.lists(st.integers(0, 1000), max_size=6),
    st.lists(st.integers(0, 1000), max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_and_any_place_to_go_on_from_give_the_same_events(
    log: Log, cuts: list[int], places: list[int], alone: bool, background: bool, scored: bool, compacts: bool
) -> None:
    logprobs = 0 if scored else -1
    first, other = (answer_for(background=background, logprobs=logprobs, compacts=compacts) for _ in range(2))
    feed(first, log, scored)
    feed(other, recut(log, cuts, alone), scored)
    events = read(first)
    assert read(other) == events
    numbers = [json.loads(chunk.data)["sequence_number"] for chunk in events]
    assert numbers == list(range(len(events)))
    assert [int(chunk.position) for chunk in events] == numbers
    for number in {place % len(events) for place in places}:
        assert read(other, [number]) == events[number + 1 :]
    with pytest.raises(InvalidParameter, match="starting_after"):
        read(other, [len(events)])


@settings(max_examples=40)
@given(logs(), st.booleans(), st.sampled_from(["", "cancelled", "failed"]), st.booleans())
def test_what_is_kept_is_shown_as_the_log_was(log: Log, scored: bool, end: str, compacts: bool) -> None:
    answer = answer_for(logprobs=1 if scored else -1, compacts=compacts)
    if end:
        tokens, _, _ = log
        entry = TokenEntry(
            f"{IDENTITY}-0", 0, 0, tokens, logprobs=[TokenLogprobs(-1.0) for _ in tokens] if scored else None
        )
        if 1 not in tokens:
            answer.generations[0].on_entry("ring", 1, entry, 1.0)
        if end == "cancelled":
            answer.generations[0].cancel(Unavailable("No more."))
        else:
            answer.generations[0].fail(RingLost("Lost too often."))
    else:
        feed(answer, log, scored)
    events = read(answer)
    shown = msgspec.json.encode(json.loads(events[-1].data)["response"])
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(stored_of(answer, shown)), type=StoredResponse)
    assert read(answer_of(kept)) == events
    assert kept.record.requests[0].prompt == [0, 0]


@given(logs())
def test_a_summary_is_whole_or_not_there(log: Log) -> None:
    answer = answer_for(compacts=True)
    feed(answer, log, scored=False)
    events: list[dict[str, Any]] = [json.loads(chunk.data) for chunk in read(answer)]
    output = events[-1]["response"]["output"]
    assert [compaction.summary_of(item, "") for item in output] == [text_of(log)] * bool(text_of(log))
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert begun == [item | {"encrypted_content": ""} for item in output]


@given(logs(), st.booleans())
def test_a_prompt_that_is_prepared_says_nothing(log: Log, compacts: bool) -> None:
    answer = answer_for(prewarm=True, compacts=compacts, parsing=PARSING)
    feed(answer, log, scored=False)
    last = json.loads(read(answer)[-1].data)
    assert (last["type"], last["response"]["output"]) == ("response.completed", [])


@given(logs(), st.booleans())
def test_the_deltas_add_up_to_the_object(log: Log, scored: bool) -> None:
    answer = answer_for(logprobs=0 if scored else -1)
    feed(answer, log, scored)
    events: list[dict[str, Any]] = [json.loads(chunk.data) for chunk in read(answer)]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    text = "".join(event["delta"] for event in deltas)
    last = events[-1]
    (item,) = last["response"]["output"]
    assert item["content"][0]["text"] == text
    assert text == text_of(log)
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == item["content"][0]["logprobs"]
    shown = [score for event in deltas for score in event["logprobs"]]
    assert shown == done["logprobs"][: len(shown)]
    assert last["response"]["usage"]["output_tokens"] == len(log[0])
    status = "incomplete" if log[1] == "length" and 1 not in log[0] else "completed"
    assert (last["type"], last["response"]["status"], item["status"]) == (f"response.{status}", status, status)


def text_of(log: Log) -> str:
    """What the tokens say, what is no whole character at the end included."""
    raw = b"".join(TOKENIZER.token_bytes(token) for token in log[0] if token != 1)
    return raw.decode(errors="replace")


PARTS = ["<think>", "</think>", "Hm. ", "\n", "So.", "<tool_call>", "</tool_call>", "<", '{"name": "f", "arguments": ']
PARTS += ['{"a": 1}}', '{"a": [', '"\u2603"]}}']
PARSING = Parsing(tools="hermes", types={"f": {"a": ""}}, reasoning="think")


@settings(max_examples=60)
@example("<think>Hm. </think>So.", "stop", [3], [2], False, True)
@given(
    st.lists(st.sampled_from(PARTS), max_size=14).map("".join),
    st.sampled_from(["stop", "length"]),
    st.lists(st.integers(0, 1000), max_size=6),
    st.lists(st.integers(0, 1000), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_calls_and_thoughts_are_events_of_the_log_too(
    text: str, finish: FinishReason, cuts: list[int], places: list[int], alone: bool, scored: bool
) -> None:
    log: Log = ([OF_BYTE[bytes([byte])] for byte in text.encode()], finish, [])
    first, other = (answer_for(logprobs=0 if scored else -1, parsing=PARSING) for _ in range(2))
    feed(first, log, scored)
    feed(other, recut(log, cuts, alone), scored)
    events = read(first)
    assert read(other) == events
    for number in {place % len(events) for place in places}:
        assert read(other, [number]) == events[number + 1 :]
    shown = [json.loads(chunk.data) for chunk in events]
    check_items(shown)


def check_items(events: list[dict[str, Any]]) -> None:
    """Every item begins and is done once, one after the other, and its deltas make its text."""
    output = events[-1]["response"]["output"]
    written: dict[int, str] = {}
    for event in events:
        index = event.get("output_index")
        if event["type"] == "response.output_item.added":
            assert index == len(written)
            written[index] = ""
        elif event["type"].endswith(".delta"):
            assert index == len(written) - 1
            assert event["item_id"] == output[index]["id"]
            written[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"] == output[index]
    assert list(written) == list(range(len(output)))
    for index, item in enumerate(output):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == written[index]
