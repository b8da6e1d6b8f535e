"""gRPC's messages, however their bytes are cut."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.grpc.framing import MessageReader
from services.gateway.core.errors import InvalidParameter, RouteError
from shared.errors import PayloadTooLarge


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.integers(1, 40)))
def test_any_cut_gives_the_same_messages(messages: list[bytes], cuts: list[int]) -> None:
    reader, data, found = MessageReader(100), b"".join(map(framed, messages)), []
    for size in cuts:
        found += reader.feed(data[:size])
        data = data[size:]
    found += reader.feed(data)
    assert found == messages
    assert not reader.partial


def test_a_message_that_is_too_large_is_refused_before_it_has_come() -> None:
    reader = MessageReader(10)
    with pytest.raises(PayloadTooLarge, match="11 bytes"):
        list(reader.feed(framed(b"x" * 11)[:5]))


def test_messages_compressed_with_gzip_are_inflated() -> None:
    reader = MessageReader(100, "gzip")
    assert list(reader.feed(framed(gzip.compress(b"x" * 100), 1) + framed(b"as it is"))) == [b"x" * 100, b"as it is"]
    assert list(reader.feed(framed(gzip.compress(b""), 1))) == [b""]


def test_an_inflated_message_has_the_same_limit() -> None:
    with pytest.raises(PayloadTooLarge, match=r"inflated more than 100 bytes.*limit body: 100"):
        list(MessageReader(100, "gzip").feed(framed(gzip.compress(b"x" * 101), 1)))


@pytest.mark.parametrize("data", [b"", b"x", gzip.compress(b"x", mtime=0)[:-1], gzip.compress(b"x", mtime=0) + b"y"])
def test_what_is_no_gzip_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidParameter, match="gzip"):
        list(MessageReader(100, "gzip").feed(framed(data, 1)))


@pytest.mark.parametrize("encoding", [None, "identity", "br"])
def test_messages_compressed_in_another_way_are_refused(encoding: str | None) -> None:
    with pytest.raises(RouteError, match="identity,gzip"):
        list(MessageReader(10, encoding).feed(framed(b"x", 1)))
