"""What a type says of a field is what is refused, by the field's name and in OpenAI's words."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from services.gateway.core.errors import InvalidParameter, convert
from services.gateway.core.pagination import PageQuery
from services.gateway.dialects.responses.schemas import ResponseRequest
from services.gateway.intake.decoding import decode, read_query
from services.gateway.intake.prompts.embeddings import EmbeddingRequest
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.persistence.chats import ChatsQuery

BODIES: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"model": "m", "prompt": "Hi"},
    ResponseRequest: {"model": "m", "input": "Hi"},
    EmbeddingRequest: {"model": "m", "input": "Hi"},
}
DECODERS = {kind: msgspec.json.Decoder(kind) for kind in BODIES}


def branches(node: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.Metadata):
        yield from branches(node.type)
    elif isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from branches(one)
    else:
        yield node


def beyond(node: inspect.Type) -> Iterator[tuple[Any, str]]:
    """Values that are one too much or too little, each with its code."""
    if isinstance(node, inspect.IntType | inspect.FloatType):
        kind = "integer" if isinstance(node, inspect.IntType) else "decimal"
        if node.le is not None:
            yield node.le + 1, f"{kind}_above_max_value"
        if node.ge is not None:
            yield node.ge - 1, f"{kind}_below_min_value"
        if node.gt is not None:
            yield node.gt, f"{kind}_below_min_value"
    elif isinstance(node, inspect.StrType):
        if node.max_length:
            yield "a" * (node.max_length + 1), "string_above_max_length"
        if node.min_length:
            yield "", "empty_string"
    elif isinstance(node, inspect.LiteralType):
        yield "something else", "invalid_value"


def bounds() -> Iterator[tuple[type[msgspec.Struct], str, Any, str]]:
    for kind in BODIES:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            for node in branches(field.type):
                for value, code in beyond(node):
                    yield kind, field.encode_name, value, code


@pytest.mark.parametrize(("kind", "name", "value", "code"), list(bounds()), ids=lambda one: str(one)[:40])
def test_what_is_beyond_a_bound_is_refused_by_name(
    kind: type[msgspec.Struct], name: str, value: Any, code: str
) -> None:
    body = BODIES[kind] | {name: value}
    ways = [lambda: decode(json.dumps(body).encode(), DECODERS[kind]), lambda: convert(body, kind)]
    for way in ways:
        with pytest.raises(InvalidParameter) as caught:
            way()
        assert caught.value.param == name
        assert caught.value.reason in (code, "unsupported_parameter")
        assert f"'{name}'" in caught.value.message


def test_elements_are_named_and_their_field_is_the_param() -> None:
    body = BODIES[CompletionRequest]
    for field, value, named, param in (
        ("stop", ["a", "a" * 1025], "'stop[1]'", "stop"),
        ("bad_words", ["a", " "], "'bad_words[1]'", "bad_words"),
        ("logit_bias", {"1": 1, "2": 100.5}, "'logit_bias.2': decimal above", "logit_bias.2"),
        ("metadata", {"a": "b", "c": "d" * 513}, "'metadata.c': string too long", "metadata.c"),
        ("metadata", {"": "b"}, "a key is empty", "metadata"),
        ("metadata", {"k" * 65: "b"}, "limit metadata_key: 64", "metadata"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            decode(json.dumps(body | {field: value}).encode(), DECODERS[CompletionRequest])
        assert named in caught.value.message
        assert caught.value.param == param


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(st.sampled_from(list(BODIES)), st.data())
def test_whatever_stands_in_a_field_is_taken_or_refused_by_its_name(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([field.encode_name for field in msgspec.structs.fields(kind)]))
    body = BODIES[kind] | {name: data.draw(values)}
    param = name
    try:
        decode(msgspec.json.encode(body), DECODERS[kind])
    except InvalidParameter as error:
        param = error.param or ""
    assert param.startswith(name)


def test_queries_are_read_as_their_types_say() -> None:
    assert read_query(b"after=x&limit=1&limit=5", PageQuery) == PageQuery(after="x", limit=5)
    query = read_query(b"metadata[a]=1&metadata%5Bb%5D=2&order=desc&after=null", ChatsQuery)
    assert (query.metadata, query.order, query.after) == ({"a": "1", "b": "2"}, "desc", "null")
    for text, param, reason in (
        (b"limit=0", "limit", "integer_below_min_value"),
        (b"limit=101", "limit", "integer_above_max_value"),
        (b"limit=x", "limit", "invalid_type"),
        (b"order=up", "order", "invalid_value"),
        (b"metadata=x", "metadata", "unknown_parameter"),
        (b"a" * 99 + b"=x", "a" * 64, "unknown_parameter"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            read_query(text, ChatsQuery)
        assert (caught.value.param, caught.value.reason) == (param, reason)
