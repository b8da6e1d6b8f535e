"""The harness itself: it sees every kind of damage, and does none of its own."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.exercise import markdown, row_of
from tests.chaos.expected import Task, stub_text
from tests.chaos.links import Forwarder
from tests.chaos.load import Load, Record, Wrong
from tests.chaos.mischief import FrameMischief


def record(text: str = "abcdef") -> Record:
    return Record("sse", Task({}, text, len(text)), started=0.0)


def take(pieces: list[str], reason: str = "length") -> None:
    reading = record()
    for piece in pieces:
        reading.take(piece, 1.0)
    reading.finish_reason = reason
    reading.finish()


def test_the_right_text_passes_however_it_is_cut() -> None:
    take(["a", "bcd", "", "ef"])


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (["ab", "def"], "length"),
        (["ab", "bcdef"], "length"),
        (["ab", "xdef"], "length"),
        (["abcde"], "length"),
        (["abcdef", "g"], "length"),
        (["abcdef"], "stop"),
    ],
    ids=["lost", "repeated", "changed", "cut short", "too much", "wrong end"],
)
def test_every_damage_is_seen(pieces: list[str], reason: str) -> None:
    with pytest.raises(Wrong):
        take(pieces, reason)


def test_a_fault_or_a_refusal_fails_the_check() -> None:
    load = Load(list, iter([]))
    load.records = [record()]
    load.check()
    load.records[0].refused.append("broker_unavailable")
    load.check(may_refuse=True)
    with pytest.raises(AssertionError, match="broker_unavailable"):
        load.check()
    load.records[0].fault = "unanswered after 90 s"
    with pytest.raises(AssertionError, match="unanswered"):
        load.check(may_refuse=True)


def test_the_stubs_text_is_a_function_of_seed_and_position() -> None:
    assert stub_text(7, 40)[:10] == stub_text(7, 10)
    assert stub_text(7, 40) != stub_text(8, 40)


def test_a_row_measures_the_streams_that_were_hit() -> None:
    hit, other = record(), record()
    hit.identity, other.identity = "chatcmpl-a", "chatcmpl-b"
    hit.arrivals, other.arrivals = [1.0, 2.0, 3.5, 3.6], [1.0, 2.0, 3.05, 3.1]
    hit.ended = other.ended = 4.0
    row = row_of("fault", [hit, other], {"a-0": 3.5}, at=2.5, detected=3.0, whole=5.0)
    assert row.gap_ms == pytest.approx(500)
    assert (row.moved, row.detected, row.streaming, row.whole) == (1, 0.5, 1.0, 2.5)
    assert row.stall == 1.5
    assert "| fault | 0.50 s | 1.00 s | 500 ms | 1.50 s | 2.50 s | 1 | 2 | 0 |" in markdown([row])


class Harmless(random.Random):
    """Never draws a fault."""

    def random(self) -> float:
        return 0.999


MESSAGES = [
    b"INFO {}\r\n",
    b"PING\r\n",
    b"MSG tokens.g 1 13\r\nMSG tokens.\r\n\r\n",
    b"HMSG tokens.g 1 $JS.ACK.x 12 14\r\nNATS/1.0\r\n\r\nab\r\n",
    b"MSG health.events 2 3\r\na\r\n\r\n",
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(1, 40), max_size=20))
def test_what_is_not_played_with_passes_unchanged(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(messages)
    mischief = FrameMischief(Harmless())
    out, begin = b"", 0
    for cut in [*cuts, len(stream)]:
        out += mischief.feed(stream[begin : begin + cut])
        begin += cut
    assert out == stream


@given(st.integers(0, 2**32 - 1))
def test_mischief_touches_live_frames_alone(seed: int) -> None:
    live = [b"MSG tokens.g 1 4\r\n%04d\r\n" % number for number in range(200)]
    others = [b"MSG tokens.g 1 $JS.ACK.x 4\r\n%04d\r\n" % number for number in range(200)]
    mischief = FrameMischief(random.Random(seed))
    out = b"".join(mischief.feed(a + b) for a, b in zip(live, others, strict=True))
    assert [m for m in _messages(out) if b"$JS" in m] == others
    assert {m for m in _messages(out) if b"$JS" not in m} <= set(live)


def _messages(stream: bytes) -> list[bytes]:
    parts = stream.split(b"\r\n")[:-1]
    return [b"%b\r\n%b\r\n" % (head, body) for head, body in zip(parts[::2], parts[1::2], strict=True)]


async def test_a_cut_link_is_silent_and_forgets_nothing() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    forwarder = Forwarder(("127.0.0.1", server.sockets[0].getsockname()[1]))
    port = await forwarder.listen("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"a")
        assert await reader.readexactly(1) == b"A"
        forwarder.cut()
        writer.write(b"b")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.2)
        forwarder.heal()
        assert await asyncio.wait_for(reader.readexactly(1), 10) == b"B"
    finally:
        writer.close()
        await forwarder.close()
        await asyncio.wait_for(gone.wait(), 10)
        server.close()
