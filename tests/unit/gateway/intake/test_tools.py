"""Tools, choices and messages about calls are checked, and refused in OpenAI's words."""

from typing import Any

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter, too_deep
from services.gateway.intake.decoding import decode
from services.gateway.intake.prompts.chat import Asked, asked_of
from services.gateway.intake.prompts.conversation import messages_for_template
from services.gateway.intake.schemas import ChatCompletionRequest, Message, TrainedMessage
from services.gateway.intake.validation import check_chat
from services.gateway.tokenizer.templates import Traits
from services.gateway.tool_calls.schemas import CalledFunction, ToolCall, types_of
from shared.limits import NESTING

DECODER = msgspec.json.Decoder(ChatCompletionRequest)
USER = {"role": "user", "content": "Hi"}


def tool(name: str = "f", **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


REGEX = {"syntax": "regex", "definition": "[0-9]+"}


def custom(name: str = "f", **fields: object) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name} | fields}


def asked(messages: list[dict[str, Any]] | None = None, **fields: object) -> Asked:
    body = msgspec.json.encode({"model": "m", "messages": messages or [USER]} | fields)
    request = decode(body, DECODER)
    check_chat(request)
    return asked_of(request)


def names(found: Asked) -> tuple[str, ...]:
    return tuple(function.name for function in found.functions)


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}


def test_what_is_asked() -> None:
    tools = [tool("f"), tool("g")]
    assert asked() == Asked()
    assert asked(tools=[], tool_choice="auto", parallel_tool_calls=True) == Asked()
    assert asked(tools=tools, tool_choice="none") == Asked()
    auto = asked(tools=tools, parallel_tool_calls=False)
    assert (names(auto), auto.required, auto.single, auto.legacy) == (("f", "g"), False, True, False)
    assert asked(tools=tools, tool_choice="required").required
    named = asked(tools=tools, tool_choice=tool("g"))
    assert (names(named), named.required, named.named, named.single) == (("g",), True, True, True)
    assert [function.name for function in named.shown] == ["f", "g"]
    allowed = asked(tools=tools, tool_choice=ALLOWED)
    assert (names(allowed), allowed.required, allowed.named) == (("g",), True, False)
    mixed = asked(tools=[tool("f"), custom("g")], tool_choice=custom("g"))
    assert (names(mixed), mixed.required, mixed.named) == (("g",), True, True)
    assert asked(tools=[custom(format={"type": "grammar", "grammar": REGEX})]).functions[0].parameters == {
        "type": "object",
        "properties": {
            "input": {"type": "string", "description": "The whole input, as plain text.", "pattern": "^(?:[0-9]+)$"}
        },
        "required": ["input"],
        "additionalProperties": False,
    }
    old = asked(functions=[{"name": "f"}], function_call={"name": "f"})
    assert (names(old), old.legacy, old.named) == (("f",), True, True)
    assert asked(functions=[{"name": "f"}], function_call="none") == Asked()
    assert asked(functions=[{"name": "f"}]).single


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "missing_required_parameter", "tools[0].custom"),
        ({"tools": [tool() | {"custom": {"name": "x"}}]}, "unsupported_parameter", "tools[0].custom"),
        ({"tools": [tool("x"), custom("x")]}, "invalid_value", "tools[1].custom.name"),
        ({"tools": [custom(format={"type": "xml"})]}, "invalid_value", "tools[0].custom.format.type"),
        (
            {"tools": [custom(format={"type": "grammar"})]},
            "missing_required_parameter",
            "tools[0].custom.format.grammar",
        ),
        (
            {"tools": [custom(format={"type": "text", "grammar": REGEX})]},
            "unsupported_parameter",
            "tools[0].custom.format.grammar",
        ),
        (
            {"tools": [custom(format={"type": "grammar", "grammar": REGEX | {"syntax": "lark"}})]},
            "unsupported_parameter",
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"tools": [tool("x")], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "invalid_value",
            "tool_choice.custom.name",
        ),
        ({"tools": [{"type": "retrieval"}]}, "invalid_value", "tools[0].type"),
        ({"tools": [tool("")]}, "empty_string", "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [tool("a" * 129)]}, "string_above_max_length", "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "invalid_value", "tools[1].function.name"),
        ({"tools": [tool(str(i)) for i in range(129)]}, "array_above_max_length", "tools"),
        (
            {"tools": [tool(parameters={"type": "array"})]},
            "invalid_function_parameters",
            "tools[0].function.parameters",
        ),
        (
            {"tools": [tool(parameters={"properties": []})]},
            "invalid_function_parameters",
            "tools[0].function.parameters",
        ),
        (
            {"tools": [tool(parameters={"required": "a"})]},
            "invalid_function_parameters",
            "tools[0].function.parameters",
        ),
        (
            {"tools": [tool(output_schema=nested(NESTING.value + 1))]},
            "invalid_function_parameters",
            "tools[0].function.output_schema",
        ),
        ({"tools": [tool(parameters="x")]}, "invalid_type", "tools[0].function.parameters"),
        ({"tools": [tool(other=1)]}, "unknown_parameter", "tools[0].function.other"),
        ({"tools": "x"}, "invalid_type", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": tool()}, "invalid_value", "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "invalid_value", "tool_choice"),
        ({"tools": [tool()], "tool_choice": tool("g")}, "invalid_value", "tool_choice.function.name"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function"}},
            "missing_required_parameter",
            "tool_choice.function",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "custom"}}, "missing_required_parameter", "tool_choice.custom"),
        ({"tools": [tool()], "tool_choice": ALLOWED}, "invalid_value", "tool_choice.allowed_tools.tools"),
        (
            {
                "tools": [tool()],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "empty_array",
            "tool_choice.allowed_tools.tools",
        ),
        ({"tools": [tool()], "functions": [{"name": "f"}]}, "invalid_value", "tools"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "invalid_value", "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "invalid_value", "function_call.name"),
        ({"function_call": {"name": "g"}}, "invalid_value", "function_call"),
        ({"messages": [USER, RESULT]}, "invalid_value", "messages[1].tool_call_id"),
        ({"messages": [USER, CALLING]}, "invalid_value", "messages[1]"),
        ({"messages": [USER, CALLING, USER]}, "invalid_value", "messages[1]"),
        (
            {"messages": [USER, CALLING, {"role": "tool", "content": "1"}]},
            "missing_required_parameter",
            "messages[2].tool_call_id",
        ),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]},
            "invalid_value",
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "assistant"}]}, "missing_required_parameter", "messages[0].content"),
        (
            {"messages": [USER, CALLING | {"tool_calls": [CALL | {"type": "custom"}]}]},
            "unsupported_parameter",
            "messages[1].tool_calls[0].function",
        ),
        (
            {"messages": [USER, CALLING | {"tool_calls": [CALL | {"type": "mcp"}]}]},
            "invalid_value",
            "messages[1].tool_calls[0].type",
        ),
        (
            {"messages": [USER, CALLING | {"tool_calls": [{"id": "x", "type": "function"}]}]},
            "missing_required_parameter",
            "messages[1].tool_calls[0].function",
        ),
        (
            {"messages": [USER, CALLING | {"tool_calls": [CALL | {"id": ""}]}]},
            "empty_string",
            "messages[1].tool_calls[0].id",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], reason: str, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        asked(**fields)
    assert (caught.value.reason, caught.value.param) == (reason, param)


def test_schemas_are_so_deep_and_no_deeper() -> None:
    assert not too_deep(nested(NESTING.value))
    assert too_deep(nested(NESTING.value + 1))
    with pytest.raises(InvalidParameter, match="limit nesting: 100 levels"):
        asked(tools=[tool(parameters=nested(300))])


def test_answered_calls_are_taken() -> None:
    second = CALL | {"id": "c2", "index": 1}
    both = CALLING | {"tool_calls": [CALL, second]}
    asked([USER, both, RESULT | {"tool_call_id": "c2"}, RESULT, USER, CALLING, RESULT])


def test_types_of_parameters() -> None:
    schema = {
        "type": "object",
        "$defs": {"colour": {"enum": ["red", "blue"]}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "number"}},
        "properties": {
            "plain": {"type": "string"},
            "several": {"type": ["integer", "null"]},
            "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/colour"}]},
            "constant": {"const": 5},
            "slash": {"$ref": "#/$defs/a~1b"},
            "any": {},
            "bool": True,
            "loop": {"$ref": "#/$defs/loop"},
            "lost": {"$ref": "#/$defs/none"},
            "remote": {"$ref": "http://x/y"},
        },
    }
    assert types_of(schema) == {
        "plain": "string",
        "several": "integer|null",
        "either": "integer|string",
        "constant": "integer",
        "slash": "number",
        "any": "",
        "bool": "",
        "loop": "",
        "lost": "",
        "remote": "",
    }
    assert types_of({}) == {}


@pytest.mark.parametrize("native", [True, False], ids=["by the template", "in words"])
def test_texts_are_shown_as_they_are_beside_calls(native: bool) -> None:
    texts = [Message("developer", "d"), Message("system", ""), Message("user", "u"), Message("assistant", "a")]
    called = Message("assistant", tool_calls=[ToolCall("id", "function", CalledFunction("f", "{}"))])
    answer, question = Message("tool", "r", tool_call_id="id"), Message("user", "v")
    assert all(text.is_text for text in texts)
    named, trained = Message("user", "u", name="n"), TrainedMessage("user", "u", weight=1)
    assert not any(other.is_text for other in (called, answer, named, trained))
    shown = messages_for_template([*texts, called, answer, question], Traits(), native=native)
    assert messages_for_template(texts, Traits(), native=native) == shown[: len(texts)]
