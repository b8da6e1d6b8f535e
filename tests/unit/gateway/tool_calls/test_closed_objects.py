"""Objects of a schema have the named properties alone, and closing one leaves no answer impossible."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from services.gateway.tool_calls.closed_objects import closed

TEXT = {"type": "string"}
A = {"type": "object", "properties": {"a": TEXT}}
B = {"type": "object", "properties": {"b": TEXT}}
CLOSED_A = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}}),
        ({"allOf": [A], "description": "One."}, {"allOf": [CLOSED_A], "description": "One."}),
        (
            {"additionalProperties": A, "properties": {"x": A}},
            {"additionalProperties": CLOSED_A, "properties": {"x": CLOSED_A}},
        ),
    ],
)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    before = msgspec.json.encode(schema)
    assert closed(schema) == expected
    assert msgspec.json.encode(schema) == before, "it is a copy"
    assert closed(expected) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        A | {"additionalProperties": True},
        A | {"additionalProperties": TEXT},
        A | {"patternProperties": {"^x": TEXT}},
        A | {"unevaluatedProperties": False},
        A | {"required": ["a", "other"]},
        A | {"minProperties": 2},
        {"allOf": [A, B]},
        A | {"anyOf": [B, {"properties": {"c": TEXT}}]},
        {"allOf": [{"$ref": "#/$defs/B"}, A], "$defs": {"B": B}},
        {"allOf": [{"$ref": "#/$defs/C"}, A], "$defs": {"B": B, "C": {"$ref": "#/$defs/B"}}},
        {"$ref": "#/$defs/B", "properties": {"a": TEXT}, "$defs": {"B": B}},
        {"const": A, "examples": [A]},
    ],
)
def test_what_stays_open(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_tree_that_refers_to_itself() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "both": {"allOf": [{"$ref": "#"}, B]}}}
    assert closed(node) == node, "it is a part of what is put together, so it stays open"
    list_ = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert closed(list_) == list_ | {"additionalProperties": False}


NAMES = st.sampled_from(["a", "b", "c"])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.just({"type": "string"}),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, min_size=1)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=6,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.just("x"), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


@given(SCHEMAS, VALUES)
def test_what_a_closed_schema_allows_the_open_one_allows(schema: Any, value: Any) -> None:
    if Draft202012Validator(closed(schema)).is_valid(value):
        assert Draft202012Validator(schema).is_valid(value)
