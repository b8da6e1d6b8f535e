"""Tools in request bodies, as OpenAI defines them."""

from typing import Any

import msgspec


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema; null: no parameters."""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: FunctionDefinition | None = None
    custom: Any = None


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ToolName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `allowed_tools`."""

    type: str
    function: FunctionName | None = None
    custom: Any = None


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: str
    tools: list[ToolName]


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` where it is more than a word."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: Any = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an assistant's message. `index` comes with what a client has put together from a stream."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None
    custom: Any = None
    index: int | None = None
