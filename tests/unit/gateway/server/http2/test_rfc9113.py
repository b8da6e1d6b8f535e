"""What RFC 9113 demands of a server, section by section: a peer's frames, and what must become of the connection or
the stream. Frames are written by hand, for no library would send these."""

from typing import NamedTuple

import pytest

from services.gateway.server.http2.connection import Http2Connection
from services.gateway.server.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    FrameLimits,
)
from services.gateway.server.http2.hpack import literal
from tests.unit.gateway.server.http2.test_connection import REQUEST, Recorder
from tests.unit.gateway.server.http2.test_connection import http2_frame as frame

CALL = [(name.encode(), value.encode()) for name, value in REQUEST]
Fields = list[tuple[bytes, bytes]]


def block(fields: Fields) -> bytes:
    return b"".join(literal(name, value) for name, value in fields)


def headers(fields: Fields = CALL, number: int = 1, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, number, block(fields))


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + value.to_bytes(4, "big"))


def without(name: bytes) -> Fields:
    return [field for field in CALL if field[0] != name]


ENDED = END_HEADERS | END_STREAM
OPEN, HALF_CLOSED = headers(), headers(flags=ENDED)
RESET = frame(RST_STREAM, 0, 1, bytes(4))


class Case(NamedTuple):
    section: str
    what: str
    sent: bytes


ENDS_THE_CONNECTION = {
    PROTOCOL_ERROR: [
        Case("3.4", "the preface is not followed by SETTINGS", b""),
        Case("4.3", "another frame between HEADERS and CONTINUATION", headers(flags=0) + frame(PING, 0, 0, bytes(8))),
        Case("4.3", "a CONTINUATION of another stream", headers(flags=0) + frame(CONTINUATION, END_HEADERS, 3, b"")),
        Case("5.1", "DATA on an idle stream", frame(DATA, 0, 1, b"x")),
        Case("5.1", "RST_STREAM on an idle stream", RESET),
        Case("5.1", "WINDOW_UPDATE on an idle stream", frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")),
        Case("5.1", "CONTINUATION on an idle stream", frame(CONTINUATION, END_HEADERS, 1, b"")),
        Case("5.1.1", "a client's stream with an even number", headers(number=2)),
        Case("5.1.1", "an even number below one that was used", headers(number=3) + headers(number=2)),
        Case("6.1", "DATA on stream 0", OPEN + frame(DATA, 0, 0, b"x")),
        Case("6.1", "padding as long as DATA", OPEN + frame(DATA, PADDED, 1, b"\1")),
        Case("6.2", "HEADERS on stream 0", headers(number=0)),
        Case("6.2", "padding longer than HEADERS", frame(HEADERS, PADDED | END_HEADERS, 1, b"\x09abc")),
        Case("6.3", "PRIORITY on stream 0", frame(PRIORITY, 0, 0, bytes(5))),
        Case("6.4", "RST_STREAM on stream 0", frame(RST_STREAM, 0, 0, bytes(4))),
        Case("6.5", "SETTINGS on a stream", OPEN + frame(SETTINGS, 0, 1, b"")),
        Case("6.5.2", "ENABLE_PUSH that is neither 0 nor 1", setting(2, 2)),
        Case("6.5.2", "a frame size below the smallest", setting(5, 16_383)),
        Case("6.5.2", "a frame size above the largest", setting(5, 1 << 24)),
        Case("6.6", "PUSH_PROMISE of a client", OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2")),
        Case("6.7", "PING on a stream", OPEN + frame(PING, 0, 1, bytes(8))),
        Case("6.8", "GOAWAY on a stream", OPEN + frame(GOAWAY, 0, 1, bytes(8))),
        Case("6.9", "a WINDOW_UPDATE of 0 for the connection", frame(WINDOW_UPDATE, 0, 0, bytes(4))),
        Case("6.10", "CONTINUATION behind the end of headers", OPEN + frame(CONTINUATION, END_HEADERS, 1, b"")),
        Case("6.10", "CONTINUATION on stream 0", headers(flags=0) + frame(CONTINUATION, END_HEADERS, 0, b"")),
    ],
    FRAME_SIZE_ERROR: [
        Case("4.2", "a frame larger than was allowed", OPEN + frame(DATA, 0, 1, bytes(16_385))),
        Case("6.4", "RST_STREAM of another size than 4", OPEN + frame(RST_STREAM, 0, 1, bytes(3))),
        Case("6.5", "SETTINGS that acknowledge and say something", frame(SETTINGS, ACK, 0, bytes(6))),
        Case("6.5", "SETTINGS of no multiple of 6", frame(SETTINGS, 0, 0, bytes(5))),
        Case("6.7", "PING of another size than 8", frame(PING, 0, 0, bytes(7))),
        Case("6.8", "GOAWAY shorter than 8", frame(GOAWAY, 0, 0, bytes(7))),
        Case("6.9", "WINDOW_UPDATE of another size than 4", frame(WINDOW_UPDATE, 0, 0, bytes(3))),
    ],
    FLOW_CONTROL_ERROR: [
        Case("6.5.2", "an initial window above the largest", setting(4, 1 << 31)),
        Case("6.9.1", "a connection's window above the largest", frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")),
        Case(
            "6.9.2",
            "an initial window that makes a stream's too large",
            OPEN + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\0\0") + setting(4, (1 << 31) - 1),
        ),
    ],
    COMPRESSION_ERROR: [Case("4.3", "headers that cannot be decoded", frame(HEADERS, END_HEADERS, 1, b"\xff" * 9))],
}
ENDS_THE_STREAM = {
    STREAM_CLOSED: [
        Case("5.1", "DATA behind the end of the request", HALF_CLOSED + frame(DATA, 0, 1, b"x")),
        Case("5.1", "HEADERS behind the end of the request", HALF_CLOSED + headers(flags=ENDED)),
    ],
    FLOW_CONTROL_ERROR: [
        Case("6.9.1", "a stream's window above the largest", OPEN + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"))
    ],
    FRAME_SIZE_ERROR: [Case("6.3", "PRIORITY of another size than 5", OPEN + frame(PRIORITY, 0, 1, bytes(4)))],
    PROTOCOL_ERROR: [
        Case("6.9", "a WINDOW_UPDATE of 0", OPEN + frame(WINDOW_UPDATE, 0, 1, bytes(4))),
        Case("8.1", "a second head that does not end the request", OPEN + headers([(b"a", b"b")])),
        Case("8.1", "trailers with a pseudo-header", OPEN + headers([(b":method", b"POST")], flags=ENDED)),
        Case("8.1.1", "less content than its length", headers([*CALL, (b"content-length", b"2")], flags=ENDED)),
        Case(
            "8.1.1",
            "more content than its length",
            headers([*CALL, (b"content-length", b"1")]) + frame(DATA, END_STREAM, 1, b"xy"),
        ),
        Case("8.1.1", "a length that is no number", headers([*CALL, (b"content-length", b"+1")])),
        Case("8.2.1", "upper case in a name", headers([*CALL, (b"X-Id", b"1")])),
        Case("8.2.1", "a name with a space", headers([*CALL, (b"x id", b"1")])),
        Case("8.2.1", "a name with a colon", headers([*CALL, (b"x:id", b"1")])),
        Case("8.2.1", "a name beyond ASCII", headers([*CALL, (b"x\xff", b"1")])),
        Case("8.2.1", "an empty name", headers([*CALL, (b"", b"1")])),
        Case("8.2.1", "a value with a line's end", headers([*CALL, (b"x-id", b"1\n2")])),
        Case("8.2.1", "a value with a NUL", headers([*CALL, (b"x-id", b"\0")])),
        Case("8.2.2", "a header of HTTP/1.1's connections", headers([*CALL, (b"connection", b"close")])),
        Case("8.2.2", "Transfer-Encoding", headers([*CALL, (b"transfer-encoding", b"chunked")])),
        Case("8.2.2", "TE other than trailers", headers([*without(b"te"), (b"te", b"gzip")])),
        Case("8.3", "an unknown pseudo-header", headers([(b":id", b"1"), *CALL])),
        Case("8.3", "a pseudo-header of answers", headers([(b":status", b"200"), *CALL])),
        Case("8.3", "a pseudo-header behind others", headers([*without(b":path"), (b":path", b"/a/b")])),
        Case("8.3.1", "a pseudo-header twice", headers([CALL[0], *CALL])),
        Case("8.3.1", "no method", headers(without(b":method"))),
        Case("8.3.1", "no scheme", headers(without(b":scheme"))),
        Case("8.3.1", "no path", headers(without(b":path"))),
        Case("8.3.1", "an empty path", headers([*CALL[:2], (b":path", b""), *CALL[3:]])),
    ],
}
IS_TAKEN = [
    Case("4.1", "a frame of an unknown kind", frame(0xAA, 0xFF, 7, b"x")),
    Case("4.1", "flags that mean nothing", frame(PING, 0xFE, 0, bytes(8))),
    Case("4.1", "the reserved bit of a stream's number", frame(WINDOW_UPDATE, 0, 1 << 31, b"\0\0\0\1")),
    Case("5.1", "PRIORITY on an idle stream", frame(PRIORITY, 0, 9, bytes(5))),
    Case("5.1", "WINDOW_UPDATE behind the end of the request", HALF_CLOSED + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1")),
    Case("5.1", "RST_STREAM behind the end of the request", HALF_CLOSED + RESET),
    Case("5.1", "frames on a closed stream", OPEN + RESET + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") + RESET),
    Case("5.1", "PRIORITY on a closed stream", OPEN + RESET + frame(PRIORITY, 0, 1, bytes(5))),
    Case("6.5.2", "an unknown setting", setting(0xFF, 1)),
    Case("6.5.3", "of a setting that comes twice the last", frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff\0\4\0\0\0\1")),
    Case("8.1", "trailers", OPEN + headers([(b"x", b"y")], flags=ENDED)),
    Case("8.1.1", "content of its length", headers([*CALL, (b"content-length", b"1")]) + frame(DATA, 1, 1, b"x")),
    Case("8.2.1", "spaces around a value, which gRPC strips", headers([*CALL, (b"x-id", b" 1 ")])),
    Case("8.3.1", "no :authority", headers(without(b":authority"))),
]


def answered(sent: bytes, *, greeted: bool = True) -> tuple[Http2Connection, list[tuple[int, int, bytes]]]:
    """The connection and the frames it wrote: kind, stream, payload."""
    server = Http2Connection(Recorder(), FrameLimits())
    server.receive(PREFACE + (frame(SETTINGS, 0, 0, b"") if greeted else frame(PING, 0, 0, bytes(8))) + sent)
    data, frames = server.take(), []
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        frames.append((data[3], int.from_bytes(data[5:9], "big"), data[9:end]))
        data = data[end:]
    return server, frames


def by_code(cases: dict[int, list[Case]]) -> list[object]:
    return [pytest.param(case, code, id=f"{case.section} {case.what}") for code, rows in cases.items() for case in rows]


@pytest.mark.parametrize(("case", "code"), by_code(ENDS_THE_CONNECTION))
def test_an_error_of_the_connection(case: Case, code: int) -> None:
    server, frames = answered(case.sent, greeted=bool(case.sent))
    assert server.failed
    kind, _, payload = frames[-1]
    assert (kind, int.from_bytes(payload[4:8], "big")) == (GOAWAY, code)


@pytest.mark.parametrize(("case", "code"), by_code(ENDS_THE_STREAM))
def test_an_error_of_the_stream(case: Case, code: int) -> None:
    server, frames = answered(case.sent + headers(number=3))
    assert not server.failed
    assert [payload for kind, number, payload in frames if (kind, number) == (RST_STREAM, 1)] == [
        code.to_bytes(4, "big")
    ]
    assert server.streams.keys() == {3}, "the next call is taken"


@pytest.mark.parametrize("case", IS_TAKEN, ids=lambda case: f"{case.section} {case.what}")
def test_no_error(case: Case) -> None:
    server, frames = answered(case.sent + headers(number=3))
    assert not server.failed
    assert [kind for kind, _, _ in frames if kind in (RST_STREAM, GOAWAY)] == []
    assert 3 in server.streams
