"""A reader that begins at any position of a log goes on exactly where the other one stood."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.registry import DIALECTS
from services.gateway.lifecycle.generation import Deliver, Generation
from services.gateway.lifecycle.records import _parts
from services.gateway.lifecycle.request_state import RequestState, merged, requests_of
from services.gateway.lifecycle.token_stream import GenerationLimits, StreamDecision
from services.gateway.streams import cursor
from services.gateway.streams.reading import Presentations
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared.errors import RyzansteinError
from shared.messages import FinishReason, GenerationRequest, SamplingParams, TokenEntry, TokenLogprobs
from shared.messages.records import GenerationRecord
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

PRESENTATIONS = Presentations({one.name: one.presentation for dialect in DIALECTS for one in dialect.endpoints})

TOKENIZER = ModelTokenizer(tiny_files())
OF_BYTE = {TOKENIZER.token_bytes(token): token for token in range(2, 258)}
LIMITS = GenerationLimits(3, 600.0, 10.0)
LOOP = asyncio.new_event_loop()


class Alone:
    """Owns the answer as a gateway without a bus would."""

    async def submit(self, answer: RequestState) -> "asyncio.Future[None]":
        raise AssertionError("it has been submitted")

    def join(self, answer: RequestState, deliver: Deliver) -> None:
        for generation in answer.generations:
            generation.attach(deliver)

    def leave(self, answer: RequestState, deliver: Deliver) -> None:
        for generation in answer.generations:
            generation.detach(deliver)

    def end_choice(self, answer: RequestState, index: int) -> None:
        pass

    def cancel(self, answer: RequestState) -> None:
        pass


def answer_of(stop: list[str], choices: int, logprobs: int, *, token_ids: bool = False) -> RequestState:
    request = GenerationRequest(
        "i-0", "r", "m", "g", [5, 6], 64, sampling=SamplingParams(logprobs=logprobs), stop_token_ids=[1]
    )
    record = GenerationRecord(
        "i",
        "chat.completions",
        0.0,
        [request],
        choices=choices,
        stop=stop,
        stream=True,
        include_usage=True,
        token_ids=token_ids,
        stop_token_ids=[1],
    )
    generations = [
        Generation(wire, index, LIMITS, now=0.0, started_at=0.0) for index, wire in enumerate(requests_of(record))
    ]
    return RequestState(record, generations, owner="g", owned=True, quiet_since=0.0, consumers=["g"])


class Reader:
    """A run that is read as its log grows."""

    def __init__(self, answer: RequestState, after: list[int] | None) -> None:
        self.run: StreamReader = PRESENTATIONS.run(answer, TOKENIZER, Alone(), after=after)
        self.run.join()
        self._found: list[StreamChunk] = []
        self._task = LOOP.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self.run.chunks():
            self._found += batch

    def news(self) -> list[StreamChunk]:
        """What it has shown since the last call."""

        async def settle() -> None:
            for _ in range(64):
                await asyncio.sleep(0)

        LOOP.run_until_complete(settle())
        found, self._found = self._found, []
        return found


Choice = tuple[str, list[Any], list[int], list[int]]


def shown(chunks: list[StreamChunk], choices: int) -> list[Choice]:
    """Text, finish and stop reasons, scored tokens and token ids of each choice."""
    found: list[Choice] = [("", [], [], []) for _ in range(choices)]
    for chunk in chunks:
        for choice in json.loads(chunk.data)["choices"]:
            text, ends, scored, ids = found[choice["index"]]
            text += choice["delta"].get("content") or ""
            ends += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
            scored += [len(item["bytes"]) for item in (choice["logprobs"] or {}).get("content", ())]
            ids += choice.get("token_ids", ())
            found[choice["index"]] = (text, ends, scored, ids)
    return found


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], FinishReason, list[int]]:
    """Tokens (bytes of UTF-8 text, perhaps cut within a character), how they end, and the entries' cuts."""
    raw = draw(st.text("ab\u00e9\u2603\U0001f600", max_size=10)).encode()
    raw = raw[: draw(st.integers(0, len(raw)))]
    tokens = [OF_BYTE[bytes([byte])] for byte in raw]
    finish: FinishReason = draw(st.sampled_from(["stop", "length"]))
    if finish == "stop" and draw(st.booleans()):
        tokens.append(1)
    return tokens, finish, sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=5)))


def entries_of(index: int, log: tuple[list[int], FinishReason, list[int]], scored: bool) -> list[TokenEntry]:
    tokens, finish, cuts = log
    bounds = list(zip([0, *cuts], [*cuts, len(tokens)], strict=True))
    return [
        TokenEntry(
            f"i-{index}",
            0,
            start,
            tokens[start:end],
            finish if number == len(bounds) - 1 else "",
            [TokenLogprobs(-1.0) for _ in tokens[start:end]] if scored else None,
        )
        for number, (start, end) in enumerate(bounds)
    ]


@settings(max_examples=60)
@given(
    st.lists(logs(), min_size=1, max_size=3),
    st.lists(st.sampled_from(["a", "b\u00e9", "\u2603\u2603", "\ufffd", "ab"]), max_size=2),
    st.booleans(),
    st.data(),
)
def test_any_event_is_a_place_to_go_on_from(
    choices: list[tuple[list[int], FinishReason, list[int]]], stop: list[str], scored: bool, data: st.DataObject
) -> None:
    answer = answer_of(stop, len(choices), 0 if scored else -1, token_ids=True)
    first = Reader(answer, None)
    feeds = [entries_of(index, log, scored) for index, log in enumerate(choices)]
    chunks: list[StreamChunk] = []
    while any(feeds):
        index = data.draw(st.sampled_from([index for index, feed in enumerate(feeds) if feed]))
        answer.generations[index].on_entry("ring", 1, feeds[index].pop(0), 1.0)
        chunks += first.news()
    whole = shown(chunks, len(choices))
    assert first.run.finished
    for (_, ends, _, ids), (tokens, finish, cuts) in zip(whole, choices, strict=True):
        assert ids == tokens[: len(ids)]
        if ends[0][1] not in stop:
            with_its_end = finish == "stop" and tokens[-1:] == [1] and cuts[-1:] != [len(tokens)]
            assert (ids, ends) == (tokens, [(finish, 1 if with_its_end else None)])
    for cut in range(1, len(chunks) + 1):
        before = chunks[:cut]
        positions = cursor.parse(before[-1].position.decode())
        after = Reader(answer, positions).news()
        if cut < len(chunks):
            assert shown(before + after, len(choices)) == whole
            assert after[-1].data == chunks[-1].data  # usage
    again = Reader(answer, None).news()
    assert shown(again, len(choices)) == whole


@given(logs(), st.data())
def test_a_resumed_reader_that_is_ahead_of_its_log_waits(
    log: tuple[list[int], FinishReason, list[int]], data: st.DataObject
) -> None:
    """The other gateway knew more when the client went than this one knows now."""
    tokens, _, _ = log
    answer = answer_of([], 1, -1)
    whole, feed = "", entries_of(0, log, False)
    reader = Reader(answer, None)
    position = data.draw(st.integers(0, len(tokens)))
    late = Reader(answer, [position])
    text = ""
    for entry in feed:
        answer.generations[0].on_entry("ring", 1, entry, 1.0)
        whole += shown(reader.news(), 1)[0][0]
        text += shown(late.news(), 1)[0][0]
    assert whole.endswith(text)
    assert reader.run.finished
    assert late.run.finished


class Followed:
    """The log of an owner whose request went through several attempts."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.frames: list[tuple[int, TokenEntry]] = []  # (epoch, entry) in the order of their recording
        self.tokens: list[int] = []  # what counts
        attempts = draw(st.integers(1, 3))
        for attempt in range(attempts):
            start = draw(st.integers(0, len(self.tokens)))
            self.frames.append((attempt, TokenEntry("i-0", attempt, start, [])))
            del self.tokens[start:]
            for _ in range(draw(st.integers(0, 3))):
                fresh = draw(st.lists(st.integers(2, 200), min_size=1, max_size=3))
                self.frames.append((attempt, TokenEntry("i-0", attempt, len(self.tokens), fresh)))
                self.tokens += fresh
        end = TokenEntry("i-0", attempts - 1, len(self.tokens), [], "length")
        self.frames.append((attempts - 1, end))


@given(st.data())
def test_a_follower_reads_what_the_owner_read(data: st.DataObject) -> None:
    """From the journal, whatever came live before it."""
    owner = Followed(data.draw)
    request = GenerationRequest("i-0", "r", "m", "g", [5], 10_000)
    generation = Generation(request, 0, LIMITS, now=0.0, started_at=0.0, followed=True)
    for index in data.draw(st.lists(st.integers(0, len(owner.frames) - 1), max_size=4)):
        epoch, entry = owner.frames[index]
        if entry.position > len(generation.tokens) and entry.attempt == generation.stream.attempt:
            generation.on_entry("ring", epoch, entry, 1.0)
    for epoch, entry in owner.frames:
        generation.on_entry("ring", epoch, entry, 1.0)
    assert generation.tokens == owner.tokens
    assert generation.state == "finished"
    assert generation.stream.attempt == owner.frames[-1][1].attempt


@given(st.data())
def test_a_follower_that_heard_the_wrong_ring_first_goes_over_to_the_right_one(data: st.DataObject) -> None:
    """Two rings have the same attempt, and the owner has heard `right` first. What the other one has said comes to a
    follower in any order among it, the end that the owner told it to make included."""
    request = GenerationRequest("i-0", "r", "m", "g", [5], 100)
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    count = data.draw(st.integers(0, len(tokens)))
    right = [TokenEntry("i-0", 0, position, [token]) for position, token in enumerate(tokens)]
    right.append(TokenEntry("i-0", 0, len(tokens), [], "length"))
    wrong = right[:count]
    wrong.append(TokenEntry("i-0", 0, count, [], "error", error_code="no_group_available", retryable=True))
    order = data.draw(st.permutations([*["right"] * len(right), *["wrong"] * len(wrong)]))
    lines = {"right": iter(right), "wrong": iter(wrong)}
    log = [(ring, next(lines[ring])) for ring in order]
    generation = Generation(request, 0, LIMITS, now=0.0, started_at=0.0, followed=True)
    decisions = [generation.on_entry(ring, 1, entry, 1.0) for ring, entry in log]
    if StreamDecision.REREAD in decisions:
        assert decisions.count(StreamDecision.REREAD) == 1
        for ring, entry in log:
            generation.on_entry(ring, 1, entry, 1.0)
    assert generation.state == "finished"
    assert generation.tokens == tokens
    assert generation.group == "right"


def test_a_follower_asks_for_what_is_missing_before_a_newer_attempt() -> None:
    request = GenerationRequest("i-0", "r", "m", "g", [5], 100)
    generation = Generation(request, 0, LIMITS, now=0.0, started_at=0.0, followed=True)
    assert generation.on_entry("a", 1, TokenEntry("i-0", 0, 0, [7]), 1.0) is StreamDecision.NOTHING
    newer = TokenEntry("i-0", 1, 3, [9])
    assert generation.on_entry("b", 1, newer, 1.0) is StreamDecision.REPLAY
    generation.on_entry("a", 1, TokenEntry("i-0", 0, 1, [7, 8]), 1.0)
    assert generation.on_entry("b", 1, newer, 1.0) is StreamDecision.NOTHING
    assert generation.tokens == [7, 7, 8, 9]
    assert generation.group == "b"


def test_taking_over_decides_what_was_left_undone() -> None:
    def followed() -> Generation:
        request = GenerationRequest("i-0", "r", "m", "g", [5], 100)
        return Generation(request, 0, LIMITS, now=0.0, started_at=0.0, followed=True)

    unheard = followed()
    assert unheard.take_over("me", 3, 1.0, 2.0) is StreamDecision.RECOVER
    heir = unheard.next_attempt(1.0, 9.0)
    assert (heir.attempt, heir.consumer, heir.claim) == (1, "me", 3)
    unheard.on_entry("a", 1, TokenEntry("i-0", 1, 0, [7]), 1.0)
    assert not unheard.ring_learns_claim(), "the request has said so"

    running = followed()
    running.on_entry("a", 1, TokenEntry("i-0", 0, 0, [7]), 1.0)
    assert running.on_group_lost("a", 1) is StreamDecision.RECOVER  # its owner's to do, not ours
    assert not running.ring_learns_claim(), "it is another gateway's"
    assert running.take_over("me", 3, 1.0, 2.0) is StreamDecision.NOTHING
    assert running.take_over("me", 3, 1.0, 2.0) is StreamDecision.NOTHING
    assert [running.ring_learns_claim() for _ in range(2)] == [True, False]

    left = followed()
    error = TokenEntry("i-0", 0, 0, [], "error", error_code="ring_lost", error="x", retryable=True)
    left.on_entry("a", 1, error, 1.0)
    assert left.take_over("me", 3, 1.0, 2.0) is StreamDecision.RECOVER

    ended = followed()
    ended.on_entry("", 0, TokenEntry("i-0", 1, 0, [], "error", error_code="deadline_exceeded"), 1.0)
    assert isinstance(ended.error, RyzansteinError)
    assert ended.take_over("me", 3, 1.0, 2.0) is StreamDecision.NOTHING


def test_positions_are_checked() -> None:
    assert cursor.show([3]) == b"3"
    assert cursor.parse(cursor.show([3, 0, 12]).decode()) == [3, 0, 12]
    cursor.check([5], [3])
    for positions in ([6], [1, 2], []):
        with pytest.raises(InvalidParameter, match="Last-Event-ID"):
            cursor.check(positions, [3])


def record_with(prompts: list[list[int]]) -> GenerationRecord:
    requests: list[Any] = [
        GenerationRequest(f"i-{index}", "r", "m", "g", prompt, 5) for index, prompt in enumerate(prompts)
    ]
    return GenerationRecord("i", "completions", 1.0, requests, prompts=len(prompts))


@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=20), min_size=1, max_size=12),
    st.integers(400, 2000),
    st.randoms(),
)
def test_a_record_comes_in_parts_and_is_put_together(prompts: list[list[int]], limit: int, random: Any) -> None:
    record = record_with(prompts)
    payloads = _parts(record, limit)
    assert all(len(payload) <= limit for payload in payloads)
    parts = [msgspec.msgpack.decode(payload, type=GenerationRecord) for payload in payloads]
    random.shuffle(parts)
    assert merged(parts) == record
    assert merged([*parts, parts[0]]) == record
    if len(parts) > 1:
        assert merged(parts[1:]) is None
