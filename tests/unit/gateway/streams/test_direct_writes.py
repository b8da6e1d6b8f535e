"""What a run writes from a callback is what its reader's task would have written."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import ClientGone
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.dialects.registry import DIALECTS
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.reading import Presentations
from services.gateway.streams.stream_reader import StreamReader
from shared.errors import RingLost
from shared.messages import FinishReason, TokenEntry
from tests.unit.gateway.dialects.anthropic import test_message_reader
from tests.unit.gateway.dialects.responses import test_events
from tests.unit.gateway.streams.test_resumed_reading import LOOP, OF_BYTE, TOKENIZER, Alone, answer_of, entries_of, logs

PRESENTATIONS = Presentations({one.name: one.presentation for dialect in DIALECTS for one in dialect.endpoints})

METRICS = GatewayMetrics(CollectorRegistry())


class Connection:
    """Takes chunks of a run directly, where it is `open`, and else from the reader's task."""

    def __init__(self, answer: RequestState, *, direct: bool, after: Sequence[int] | None = None) -> None:
        self.run: StreamReader = PRESENTATIONS.run(
            answer, TOKENIZER, Alone(), metrics=METRICS.of_model("tiny"), after=after
        )
        self.run.join()
        self.open = True
        self.chunks: list[StreamChunk] = []
        self.written = 0  # chunks that were written directly
        self.turns = 0  # batches of the task
        self.task = LOOP.create_task(self._read(direct))
        settle()

    async def _read(self, direct: bool) -> None:
        async for batch in self.run.chunks(self._write if direct else None):
            self.turns += 1
            self.chunks += batch

    def _write(self, batch: Sequence[StreamChunk]) -> bool:
        if self.open:
            self.chunks += batch
            self.written += len(batch)
        return self.open


def settle() -> None:
    async def turns() -> None:
        for _ in range(16):
            await asyncio.sleep(0)

    LOOP.run_until_complete(turns())


def letters(answer: RequestState, text: str, finish: FinishReason = "") -> None:
    """The next tokens of the only choice."""
    generation = answer.generations[0]
    tokens = [OF_BYTE[bytes([byte])] for byte in text.encode()]
    generation.on_entry("ring", 1, TokenEntry(generation.id, 0, generation.stream.position, tokens, finish), 1.0)


def said(connection: Connection) -> str:
    shown = [json.loads(chunk.data) for chunk in connection.chunks if not chunk.comment]
    choices = [choice for chunk in shown for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@settings(max_examples=60)
@given(
    st.lists(logs(), min_size=1, max_size=3),
    st.lists(st.sampled_from(["a", "b\u00e9", "ab"]), max_size=1),
    st.booleans(),
    st.data(),
)
def test_a_connection_gets_the_same_chunks_either_way(
    choices: list[tuple[list[int], FinishReason, list[int]]], stop: list[str], scored: bool, data: st.DataObject
) -> None:
    answer = answer_of(stop, len(choices), 0 if scored else -1, token_ids=data.draw(st.booleans()))
    plain, direct = Connection(answer, direct=False), Connection(answer, direct=True)
    feeds = [entries_of(index, log, scored) for index, log in enumerate(choices)]
    while any(feeds):
        for _ in range(data.draw(st.integers(1, 3))):  # at once
            if left := [index for index, feed in enumerate(feeds) if feed]:
                index = data.draw(st.sampled_from(left))
                answer.generations[index].on_entry("ring", 1, feeds[index].pop(0), 1.0)
        direct.open = data.draw(st.booleans())
        settle()
        assert direct.chunks == plain.chunks
    assert plain.run.finished
    assert direct.run.finished
    assert direct.task.done()


@pytest.mark.parametrize("answer", [test_message_reader.answer_for(None), test_events.answer_for()])
def test_numbered_events_are_written_the_same(answer: RequestState) -> None:
    plain, direct = Connection(answer, direct=False), Connection(answer, direct=True)
    for letter in ("a", "b", "cd", "d", "e", "fg"):
        letters(answer, letter)
        settle()
        assert direct.chunks == plain.chunks
    assert direct.turns == 1
    assert direct.written >= 3
    letters(answer, "e", "length")
    settle()
    assert direct.run.finished
    assert [chunk.event for chunk in direct.chunks] == [chunk.event for chunk in plain.chunks]


def direct() -> tuple[RequestState, Connection]:
    answer = answer_of([], 1, -1)
    return answer, Connection(answer, direct=True)


def test_ordinary_tokens_wake_no_task() -> None:
    answer, connection = direct()
    for letter in "abcd":
        letters(answer, letter)
        settle()
    assert (said(connection), connection.turns, connection.written) == ("abcd", 1, 3)
    letters(answer, "e", "length")
    settle()
    assert (said(connection), connection.turns, connection.written) == ("abcde", 2, 3)


def test_what_cannot_be_written_is_left_to_the_task() -> None:
    answer, connection = direct()
    letters(answer, "a")
    settle()
    connection.open = False
    letters(answer, "b")
    settle()
    assert (said(connection), connection.turns, connection.written) == ("ab", 2, 0)
    connection.open = True
    letters(answer, "c")
    settle()
    assert (said(connection), connection.turns, connection.written) == ("abc", 2, 1)


def test_more_than_is_taken_at_once_is_all_read() -> None:
    answer, connection = direct()
    letters(answer, "a")
    settle()
    for _ in range(100):
        letters(answer, "b")
    settle()
    assert said(connection) == "a" + 100 * "b"


def test_what_a_client_has_is_not_written_again() -> None:
    answer = answer_of([], 1, -1)
    connection = Connection(answer, direct=True, after=[3])
    generation = answer.generations[0]
    generation.on_entry("ring", 1, TokenEntry(generation.id, 0, 0, [], computed=1), 1.0)
    settle()
    assert connection.turns == 1, "progress was shown before the first token"
    for letter in "abcde":
        letters(answer, letter)
        settle()
    assert (said(connection), connection.turns, connection.written) == ("de", 1, 2)
    letters(answer, "f", "length")
    settle()
    assert said(connection) == "def"


def test_an_error_comes_behind_the_tokens_before_it() -> None:
    answer, connection = direct()
    letters(answer, "a")
    settle()
    letters(answer, "b")
    answer.generations[0].fail(RingLost("It is lost."))
    settle()
    assert said(connection) == "ab"
    with pytest.raises(RingLost):
        connection.task.result()


def test_a_fault_in_the_callback_ends_the_reading() -> None:
    answer, connection = direct()
    letters(answer, "a")
    settle()
    connection.written = None  # type: ignore[assignment]  # it cannot be counted up
    letters(answer, "b")
    settle()
    with pytest.raises(TypeError):
        connection.task.result()


def test_nothing_is_written_for_a_client_that_has_gone() -> None:
    answer, connection = direct()
    letters(answer, "a")
    settle()
    letters(answer, "b")
    connection.run.end(ClientGone())
    settle()
    assert (said(connection), connection.written) == ("a", 0)
    with pytest.raises(ClientGone):
        connection.task.result()
