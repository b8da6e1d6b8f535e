"""gRPC's messages, however their bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import RouteError
from services.gateway.grpc.framing import MessageReader
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
        reader.feed(framed(b"x" * 11)[:5])


def test_compressed_messages_are_refused() -> None:
    with pytest.raises(RouteError, match="identity"):
        MessageReader(10).feed(framed(b"x", 1))
