"""HPACK, read from memory where it repeats itself, and written by hand."""

import base64
import contextlib

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.errors import InvalidParameter
from services.gateway.server.http2 import hpack
from services.gateway.server.http2.hpack import HeaderDecoder, Headers, HeadersTooLarge

NAMES = st.sampled_from(["x-session-id", "x-request-id", "grpc-timeout", "a-rather-long-name-of-a-header"])
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=200).map(str.strip)
BASE = [(":method", "POST"), (":path", "/a/b"), ("content-type", "application/grpc")]


@given(st.lists(st.tuples(st.dictionaries(NAMES, VALUES), st.booleans()), min_size=1, max_size=12))
def test_remembered_blocks_mean_what_they_would_without_memory(requests: list[tuple[dict[str, str], bool]]) -> None:
    encoder, decoder = Encoder(), HeaderDecoder(1 << 16)
    for metadata, huffman in requests:
        for _ in range(3):  # the first changes the table, the third is remembered
            block = encoder.encode(BASE + list(metadata.items()), huffman=huffman)
            size = sum(len(name) + len(value.encode()) + 32 for name, value in [*BASE, *metadata.items()])
            assert decoder.decode(block) == Headers("POST", "/a/b", "application/grpc", metadata, size)


def test_a_resized_table_forgets_what_blocks_meant() -> None:
    encoder, decoder = Encoder(), HeaderDecoder(1 << 16)
    for size in (4096, 0, 4096):
        encoder.header_table_size = size
        for value in ("1", "2", "2"):
            decoded = decoder.decode(encoder.encode([*BASE, ("x-session-id", value)]))
            assert decoded.metadata == {"x-session-id": value}


def test_too_many_headers_are_told_apart_from_nonsense() -> None:
    with pytest.raises(HeadersTooLarge):
        HeaderDecoder(100).decode(Encoder().encode([("x", "y" * 200)]))


@given(st.binary(max_size=200))
def test_nonsense_is_a_value_error(block: bytes) -> None:
    with contextlib.suppress(ValueError, HeadersTooLarge):
        HeaderDecoder(1 << 14).decode(block)


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=5000))
def test_literals_are_hpack(name: bytes, value: bytes) -> None:
    assert Decoder(1 << 20).decode(hpack.literal(name, value), raw=True) == [(name, value)]


def test_how_every_answer_begins() -> None:
    assert Decoder().decode(hpack.RESPONSE) == [
        (":status", "200"),
        ("content-type", "application/grpc"),
        ("grpc-accept-encoding", "identity,gzip"),
    ]


@pytest.mark.parametrize(
    ("given", "seconds"), [("5S", 5.0), ("100m", 0.1), ("7u", 7e-6), ("2M", 120.0), ("1H", 3600.0), ("9n", 9e-9)]
)
def test_time_outs(given: str, seconds: float) -> None:
    assert Headers("", "", "", {"grpc-timeout": given}).timeout == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "5", "S", "-1S", "123456789S", "5s"])
def test_wrong_time_outs(given: str) -> None:
    with pytest.raises(InvalidParameter, match="grpc-timeout"):
        _ = Headers("", "", "", {"grpc-timeout": given}).timeout


@given(st.binary(max_size=100))
def test_binary_values(value: bytes) -> None:
    encoded = hpack.binary(value)
    assert base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True) == value


def test_status_messages_are_percent_encoded() -> None:
    assert hpack.percent_encoded("100% ü\n") == b"100%25 %C3%BC%0A"
