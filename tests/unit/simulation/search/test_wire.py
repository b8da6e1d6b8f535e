"""What is told of bytes in a story."""

import msgspec

from tests.simulation.search import wire


def test_messages_of_nats_are_told_with_subject_and_content() -> None:
    body, packed = b'{"a":1}', msgspec.msgpack.encode({"id": "gen-1"})
    data = b"PUB intake.x reply %d\r\n%s\r\n" % (len(body), body)
    data += b"HMSG tokens.gw 1 12 %d\r\nNATS/1.0\r\n\r\n%s\r\nPING\r\n" % (12 + len(packed), packed)
    assert list(wire.told(data)) == ["publish intake.x  {'a': 1}", "deliver tokens.gw  {'id': 'gen-1'}"]


def test_events_of_asgi_are_told() -> None:
    events = [
        {"type": "http.response.start", "status": 503, "headers": []},
        {"type": "http.response.body", "body": b'{"error":{"code":"x"}}', "more_body": False},
    ]
    data = b"".join(len(one).to_bytes(4) + one for one in map(msgspec.msgpack.encode, events))
    assert list(wire.told(data)) == ["http.response.start 503", "http.response.body {'error': {'code': 'x'}}"]


def test_what_is_not_understood_is_shown_as_it_is_and_cut_off() -> None:
    assert list(wire.told(b"PING\r\n")) == ["PING"]
    assert list(wire.told(b"\xff" * 300)) == ["\\xff" * 40 + " ..."]
    assert list(wire.told(b"PUB a 5")) == ["PUB a 5"]
