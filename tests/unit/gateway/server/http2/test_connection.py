"""Our end of HTTP/2 against the h2 package's, which refuses whatever breaks the protocol."""

from collections.abc import Callable

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.server.http2 import frames as http2
from services.gateway.server.http2.connection import Http2Connection
from services.gateway.server.http2.frames import PREFACE, FrameLimits, Stream
from services.gateway.server.http2.hpack import RESPONSE, Headers, literal

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/b"),
    (":authority", "test"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
TRAILERS = literal(b"grpc-status", b"0")


class Recorder:
    """Takes the events of a connection."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[Stream, Headers]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.reset: list[int] = []
        self.writable: list[int] = []

    def on_headers(self, stream: Stream, headers: Headers, ended: bool) -> None:
        self.requests[stream.id] = stream, headers
        self.data[stream.id] = b""
        if ended:
            self.ended.add(stream.id)

    def on_data(self, stream: Stream, data: bytes, ended: bool) -> None:
        self.data[stream.id] += data
        if ended:
            self.ended.add(stream.id)

    def on_reset(self, stream: Stream) -> None:
        self.reset.append(stream.id)

    def on_writable(self, stream: Stream) -> None:
        self.writable.append(stream.id)


class Pair:
    """A client of the h2 package, and our end."""

    def __init__(self, limits: FrameLimits | None = None) -> None:
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.recorder = Recorder()
        self.server = Http2Connection(self.recorder, limits or FrameLimits())
        self.events: list[h2.events.Event] = []
        self.client.initiate_connection()

    def exchange(self, cut: Callable[[bytes], list[bytes]] = lambda data: [data]) -> None:
        """Until neither has anything to say."""
        while True:
            sent, said = self.client.data_to_send(), self.server.take()
            for part in cut(sent):
                self.server.receive(part)
            for part in cut(said):
                self.events += self.client.receive_data(part)
            if self.server.unread:
                self.server.receive()
            if not sent and not said:
                return

    def ask(self, data: bytes = b"", *, end: bool = True) -> Stream:
        number = self.client.get_next_available_stream_id()
        self.client.send_headers(number, REQUEST)
        self.client.send_data(number, data, end_stream=end)
        self.exchange()
        return self.recorder.requests[number][0]

    def received(self, number: int) -> bytes:
        """The data of a stream's answer so far."""
        parts = [e for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == number]
        return b"".join(part.data for part in parts)

    def ended(self, number: int) -> bool:
        return any(isinstance(e, h2.events.StreamEnded) and e.stream_id == number for e in self.events)

    def take_all(self) -> None:
        """The client gives back what it has read, until there is nothing more."""
        acknowledged = 0
        while True:
            news = [e for e in self.events if isinstance(e, h2.events.DataReceived)]
            if acknowledged == len(news):
                return
            for event in news[acknowledged:]:
                self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            acknowledged = len(news)
            self.exchange()


def goodbye(server: Http2Connection) -> int:
    """The error code of the GOAWAY that is to be written."""
    said = server.take()
    at = 0
    while at < len(said):
        size, kind = int.from_bytes(said[at : at + 3], "big"), said[at + 3]
        if kind == http2.GOAWAY:
            return int.from_bytes(said[at + 13 : at + 17], "big")
        at += 9 + size
    raise AssertionError("there is no GOAWAY")


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


@given(st.binary(max_size=40_000), st.lists(st.binary(max_size=40_000), max_size=4), st.integers(1, 30_000))
def test_a_request_and_its_answer_however_they_are_cut(request: bytes, messages: list[bytes], size: int) -> None:
    def cut(data: bytes) -> list[bytes]:
        return [data[at : at + size] for at in range(0, len(data), size)]

    pair = Pair()
    for at in range(0, len(request), 10_000):
        if not at:
            pair.client.send_headers(1, REQUEST)
        pair.client.send_data(1, request[at : at + 10_000])
    if not request:
        pair.client.send_headers(1, REQUEST)
    pair.client.end_stream(1)
    pair.exchange(cut)
    stream, headers = pair.recorder.requests[1]
    assert (headers.path, headers.metadata["te"]) == ("/a/b", "trailers")
    assert pair.recorder.data[1] == request
    assert pair.recorder.ended == {1}
    for number, message in enumerate(messages):
        pair.server.send(stream, b"" if number else RESPONSE, message)
    pair.server.end(stream, TRAILERS if messages else RESPONSE + TRAILERS)
    pair.exchange(cut)
    pair.take_all()
    assert pair.received(1) == b"".join(map(framed, messages))
    assert pair.ended(1)
    assert not pair.server.streams


def test_what_the_window_does_not_take_waits() -> None:
    pair = Pair()
    stream = pair.ask(b"x")
    message = b"y" * 200_000
    assert not pair.server.send(stream, RESPONSE, message)
    pair.server.end(stream, TRAILERS)
    pair.exchange()
    assert len(pair.received(1)) == 65_535
    assert len(stream.pending) - stream.sent == pair.server.owed == 200_005 - 65_535
    assert not pair.ended(1)
    pair.take_all()
    assert pair.received(1) == framed(message)
    assert pair.ended(1)
    assert pair.recorder.writable == [1]


def test_smaller_and_larger_initial_windows_count_for_open_streams() -> None:
    pair = Pair()
    stream = pair.ask(b"x")
    pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
    pair.exchange()
    assert stream.window == 10
    assert not pair.server.send(stream, RESPONSE, b"y" * 20)
    pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100})
    pair.exchange()
    assert pair.received(1) == framed(b"y" * 20)


def test_a_sender_is_held_back_until_what_it_sent_is_used() -> None:
    pair = Pair()
    stream = pair.ask(b"x" * 16_000, end=False)
    for _ in range(3):
        pair.client.send_data(1, b"x" * 16_000)
    pair.exchange()
    assert pair.client.local_flow_control_window(1) == 65_535 - 64_000
    pair.server.release(stream)
    pair.exchange()
    assert pair.client.local_flow_control_window(1) == 65_535


def test_more_streams_than_allowed_are_refused_and_may_be_tried_again() -> None:
    pair = Pair(FrameLimits(streams=1))
    pair.server.receive(pair.client.data_to_send())
    for number in (1, 3):  # before the client has heard of the limit
        pair.client.send_headers(number, REQUEST)
    pair.exchange()
    resets = [event for event in pair.events if isinstance(event, h2.events.StreamReset)]
    assert [(event.stream_id, event.error_code) for event in resets] == [(3, h2.errors.ErrorCodes.REFUSED_STREAM)]
    assert pair.recorder.requests.keys() == {1}


def test_a_client_that_goes_is_told_of_and_owed_nothing() -> None:
    pair = Pair()
    stream = pair.ask(b"x")
    pair.client.reset_stream(1)
    pair.exchange()
    assert (pair.recorder.reset, stream.closed) == ([1], True)
    pair.server.send(stream, RESPONSE, b"late")
    pair.server.end(stream, TRAILERS)
    pair.exchange()
    assert not pair.server.streams


def test_an_answer_before_the_end_of_the_request_ends_the_request() -> None:
    pair = Pair()
    stream = pair.ask(b"x", end=False)
    pair.server.end(stream, RESPONSE + TRAILERS)
    pair.exchange()
    assert pair.ended(1)
    pair.server.receive(http2_frame(http2.DATA, 0, 1, b"more"))
    assert not pair.server.failed


def test_an_announced_end_lets_streams_end_and_refuses_none_that_come_at_once() -> None:
    pair = Pair()
    first = pair.ask(b"x")
    pair.client.send_headers(3, REQUEST, end_stream=True)
    pair.server.announce_end()
    pair.exchange()
    assert pair.recorder.requests.keys() == {1, 3}
    for stream in (first, pair.recorder.requests[3][0]):
        pair.server.end(stream, RESPONSE + TRAILERS)
    assert http2_kinds(pair.server.take()) == [http2.HEADERS, http2.HEADERS]


def test_pings_are_answered_and_sent() -> None:
    pair = Pair()
    pair.client.ping(b"12345678")
    pair.server.ping()
    assert pair.server.pinged
    pair.exchange()
    assert not pair.server.pinged
    assert any(isinstance(event, h2.events.PingAckReceived) for event in pair.events)


def test_padding_priorities_continuations_and_unknown_frames_are_read() -> None:
    pair = Pair()
    pair.exchange()
    block = pair.client.encoder.encode(REQUEST)
    said = http2_frame(0xAA, 0, 0, b"?") + http2_frame(http2.PRIORITY, 0, 5, b"\0\0\0\0\1")
    said += http2_frame(http2.HEADERS, http2.PADDED | http2.PRIORITY_FLAG, 1, b"\2\0\0\0\0\1" + block[:4] + b"\0\0")
    said += http2_frame(http2.CONTINUATION, 0, 1, block[4:9])
    said += http2_frame(http2.CONTINUATION, http2.END_HEADERS, 1, block[9:])
    said += http2_frame(http2.DATA, http2.PADDED | http2.END_STREAM, 1, b"\3data\0\0\0")
    pair.server.receive(said)
    assert not pair.server.failed
    assert (pair.recorder.requests[1][1].path, pair.recorder.data[1], pair.recorder.ended) == ("/a/b", b"data", {1})


def http2_frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def http2_kinds(data: bytes) -> list[int]:
    kinds = []
    while data:
        kinds.append(data[3])
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return kinds


GREETING = PREFACE + http2_frame(http2.SETTINGS, 0, 0, b"")
# Beside those of test_rfc9113, which are in the order of its sections.
FAULTS = {
    "headers shorter than their priority": (http2_frame(http2.HEADERS, 0x24, 1, b"12"), http2.FRAME_SIZE_ERROR),
    "endless headers": (
        http2_frame(http2.HEADERS, 0, 1, b"") + http2_frame(http2.CONTINUATION, 0, 1, b"x" * 9000) * 8,
        http2.ENHANCE_YOUR_CALM,
    ),
    "endless empty continuations": (
        http2_frame(http2.HEADERS, 0, 1, b"") + http2_frame(http2.CONTINUATION, 0, 1, b"") * 100,
        http2.ENHANCE_YOUR_CALM,
    ),
    "headers of too many bytes": (http2_frame(http2.HEADERS, 4, 1, literal(b"a", b"") * 2000), http2.ENHANCE_YOUR_CALM),
}
# Of stream 1.
OPENED = http2_frame(http2.HEADERS, 4, 1, b"".join(literal(name.encode(), value.encode()) for name, value in REQUEST))
ENDED = OPENED + http2_frame(http2.DATA, 1, 1, b"")
FLOODS = {
    "pings": http2_frame(http2.PING, 0, 0, b"12345678"),
    "settings": http2_frame(http2.SETTINGS, 0, 0, b""),
    "settings of many names": http2_frame(
        http2.SETTINGS, 0, 0, b"".join(number.to_bytes(2, "big") + bytes(4) for number in range(100, 2800))
    ),
    "windows of the connection": http2_frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "windows of a stream": http2_frame(http2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
    "priorities": http2_frame(http2.PRIORITY, 0, 1, bytes(5)),
    "frames of an unknown kind": http2_frame(0xAA, 0, 0, b""),
    "empty data": http2_frame(http2.DATA, 0, 1, b""),
    "acknowledgements": http2_frame(http2.PING, 1, 0, b"12345678"),
    "resets of a stream that has gone": http2_frame(http2.RST_STREAM, 0, 1, bytes(4)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_of_any_kind_ends_the_connection(name: str) -> None:
    server = Http2Connection(Recorder(), FrameLimits(work=10_000))
    server.receive(GREETING + OPENED + FLOODS[name] * 10_001)
    while server.unread:
        server.take()
        server.receive()
    assert "limit grpc_work: 10,000 frames" in server.failed
    assert goodbye(server) == http2.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("said", [OPENED, ENDED], ids=["as trailers", "of a stream that has gone"])
def test_headers_that_belong_to_no_new_call_cost_what_they_take_to_decode(said: bytes) -> None:
    """Each of 1,000 indexed headers is a byte on the wire."""
    server = Http2Connection(Recorder(), FrameLimits(work=10_000))
    server.receive(GREETING + said + http2_frame(http2.HEADERS, 4, 1, b"\x82" * 1_000) * 10)
    while server.unread:
        server.take()
        server.receive()
    assert "limit grpc_work" in server.failed


def test_a_turn_ends_after_so_much_work_and_the_rest_is_read_in_later_ones() -> None:
    server = Http2Connection(Recorder(), FrameLimits())
    server.receive(GREETING + http2_frame(http2.PRIORITY, 0, 1, bytes(5)) * 9_999)
    turns = 1
    while server.unread:
        server.receive()
        turns += 1
    assert (turns, server.failed) == (10, "")


def test_a_window_of_the_connection_looks_at_no_stream_whose_own_is_closed() -> None:
    pair = Pair(FrameLimits(connection_window=1 << 20))
    pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1})
    streams = [pair.ask(b"x") for _ in range(100)]
    for stream in streams:
        pair.server.send(stream, RESPONSE, b"y" * 10)
    before = pair.server.work.spent
    pair.server.receive(http2_frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 100)
    assert pair.server.work.spent - before == 100, "the frames alone"
    pair.client.increment_flow_control_window(100, stream_id=streams[50].id)
    pair.exchange()
    assert pair.received(streams[50].id) == framed(b"y" * 10)


def test_streams_that_wait_for_the_connections_window_go_on_when_it_opens() -> None:
    pair = Pair()
    streams = [pair.ask(b"x") for _ in range(3)]
    for stream in streams:
        pair.server.send(stream, RESPONSE, b"y" * 40_000)
        pair.server.end(stream, TRAILERS)
    pair.exchange()
    assert [len(pair.received(stream.id)) for stream in streams] == [40_005, 25_530, 0]
    pair.take_all()
    assert [pair.received(stream.id) for stream in streams] == [framed(b"y" * 40_000)] * 3
    assert pair.recorder.writable == [1, 3, 5]


def test_calls_that_are_answered_cost_nothing_however_many() -> None:
    pair = Pair(FrameLimits(work=1_000))
    for _ in range(200):
        stream = pair.ask(b"x" * 100)
        pair.server.charge(stream, 30)
        pair.server.excuse(stream)
        pair.server.end(stream, RESPONSE + TRAILERS)
        pair.exchange()
    assert not pair.server.failed


# --- answers that the peer's windows hold back ------------------------------------------------------


def test_a_stream_whose_window_stays_closed_is_ended_and_others_go_on() -> None:
    pair = Pair()
    stuck, slow = pair.ask(b"x"), pair.ask(b"x")
    pair.client.increment_flow_control_window(1 << 20)
    for stream in (stuck, slow):
        pair.server.send(stream, RESPONSE, b"y" * 100_000)
    pair.exchange()
    for seconds in (0.0, 60.0):
        assert pair.server.end_stalled(seconds, 60.0) == 0
    pair.client.increment_flow_control_window(1, stream_id=slow.id)
    pair.exchange()
    assert pair.server.end_stalled(61.0, 60.0) == 1
    pair.exchange()
    resets = [event for event in pair.events if isinstance(event, h2.events.StreamReset)]
    assert [(event.stream_id, event.error_code) for event in resets] == [
        (stuck.id, h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
    ]
    assert pair.recorder.reset == [stuck.id]
    assert pair.server.owed == 100_005 - 65_536


def test_a_connection_whose_window_stays_closed_is_ended() -> None:
    pair = Pair()
    pair.server.send(pair.ask(b"x"), RESPONSE, b"y" * 40_000)
    pair.server.send(pair.ask(b"x"), RESPONSE, b"y" * 40_000)
    pair.exchange()
    pair.server.end_stalled(0.0, 60.0)
    pair.client.ping(b"12345678")  # what is no answer is no progress
    pair.exchange()
    assert pair.server.end_stalled(61.0, 60.0) == 1
    assert "answers that are not read (limit grpc_keepalive: 60 seconds" in pair.server.failed
    assert pair.server.owed < 200


def test_a_connection_whose_window_opens_a_little_now_and_then_is_slow_and_not_stuck() -> None:
    pair = Pair()
    pair.server.send(pair.ask(b"x"), RESPONSE, b"y" * 60_000)
    waiting = pair.ask(b"x")
    pair.server.send(waiting, RESPONSE, b"y" * 60_000)
    for turn in range(10):
        pair.client.increment_flow_control_window(100)
        pair.exchange()
        assert pair.server.end_stalled(50.0 * turn, 60.0) == 0
    assert not waiting.closed


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_protocol_ends_the_connection_with_its_code(name: str) -> None:
    said, code = FAULTS[name]
    server = Http2Connection(Recorder(), FrameLimits())
    server.receive(GREETING + said)
    while server.unread:
        server.take()
        server.receive()
    assert server.failed
    assert goodbye(server) == code
    server.receive(said)
    assert not server.take(), "nothing is said after it"


def test_opening_and_resetting_for_ever_is_an_attack_and_a_few_resets_are_not() -> None:
    pair = Pair(FrameLimits(work=2_000))
    for _ in range(10):
        stream = pair.ask(b"x")
        pair.client.reset_stream(stream.id)
        pair.exchange()
    assert not pair.server.failed
    for _ in range(10):
        pair.client.reset_stream(pair.ask(b"x").id)
        pair.server.receive(pair.client.data_to_send())
        if pair.server.failed:
            break
    assert "grpc_work: 2,000 frames" in pair.server.failed
    assert goodbye(pair.server) == http2.ENHANCE_YOUR_CALM


def test_more_data_than_the_window_breaks_the_stream_alone() -> None:
    pair = Pair()
    stream = pair.ask(b"x", end=False)
    for _ in range(5):
        pair.server.receive(http2_frame(http2.DATA, 0, 1, b"x" * 16_000))
    assert (pair.recorder.reset, stream.closed, pair.server.failed) == ([1], True, "")


def test_other_protocols_are_told_what_this_is() -> None:
    server = Http2Connection(Recorder(), FrameLimits())
    server.receive(b"GET / HTTP/1.1\r\n\r\n")
    assert server.failed
    assert server.take().startswith(b"HTTP/1.1 505 ")


def test_a_lost_connection_resets_every_stream() -> None:
    pair = Pair()
    pair.ask(b"x")
    pair.ask(b"x")
    pair.server.lose()
    assert pair.recorder.reset == [1, 3]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))))
def test_no_frames_at_all_make_it_fail_in_another_way_than_it_should(frames: list[tuple[int, int, int, bytes]]) -> None:
    server = Http2Connection(Recorder(), FrameLimits())
    server.receive(GREETING)
    for frame in frames:
        server.receive(http2_frame(*frame))
    if server.failed:
        assert goodbye(server)
        assert not server.streams


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    server = Http2Connection(Recorder(), FrameLimits())
    server.receive(GREETING + data)
    server.take()
