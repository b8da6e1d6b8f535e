"""Values that models write without JSON's marks, by the types that a tool's schema gives."""

import pytest

from services.gateway.tool_calls.parsers.values import of_literal, of_type


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("7", "string", '"7"'),
        ("7", "string|integer", "7"),
        ("7", "number", "7"),
        ("[1]", "string|integer", '"[1]"'),
        ("[1]", "integer", "[1]"),
        ("True", "boolean", "true"),
        ("NaN", "number", '"NaN"'),
        ("a b", "integer", '"a b"'),
    ],
)
def test_a_value_is_read_as_one_of_its_types(text: str, types: str, value: str) -> None:
    assert of_type(text, types) == value


def test_what_is_no_literal_is_a_string() -> None:
    assert of_literal("{'a': (1, None)}") == '{"a": [1, null]}'
    assert of_literal("Infinity") == '"Infinity"'
    assert of_literal("1 +") == '"1 +"'
