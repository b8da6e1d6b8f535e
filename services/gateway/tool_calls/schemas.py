"""Tools in request bodies, as OpenAI defines them; the JSON types of their parameters, and how deep JSON is. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.tool_calls.parsers.scanner import TYPE_OF
from shared.limits import FUNCTION_NAME

ToolNameText = Annotated[
    str,
    FUNCTION_NAME.length(
        min_length=1,
        pattern=r"^[a-zA-Z0-9_-]*$(?!\n)",
        extra={"expected": "a string that matches the pattern '^[a-zA-Z0-9_-]+$'"},
    ),
]


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: ToolNameText
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema; null: no parameters
    strict: bool | None = None
    # A JSON Schema of what it returns: templates that show whole functions show it as `return`.
    output_schema: dict[str, Any] | None = None


INPUT = "input"  # the one argument as which a model writes the input of a custom tool


class CustomGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    definition: Annotated[str, Meta(min_length=1)]
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the input of a custom tool looks like: any text, or what a grammar allows."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool whose input is a text, and no JSON."""

    name: ToolNameText
    description: str | None = None
    format: CustomFormat | None = None


class CustomFunction(FunctionDefinition, frozen=True, forbid_unknown_fields=True):
    """A custom tool as models know tools: a function of one text, which its client gets without the JSON."""

    @classmethod
    def of(cls, tool: CustomTool) -> "CustomFunction":
        """With a format of syntax `regex`, or none."""
        text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
        grammar = tool.format.grammar if tool.format else None
        if grammar is not None:
            text["pattern"] = f"^(?:{grammar.definition})$"
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        return cls(tool.name, tool.description, parameters, strict=True)


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: FunctionDefinition | None = None
    custom: CustomTool | None = None


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ToolName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `allowed_tools`."""

    type: Literal["function", "custom"]
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @property
    def named(self) -> FunctionName | None:
        return self.custom if self.type == "custom" else self.function


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Meta(min_length=1)]


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` where it is more than a word."""

    type: Literal["function", "allowed_tools", "custom"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: FunctionName | None = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class CalledCustom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an assistant's message. `index` comes with what a client has put together from a stream."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: int | None = None


DEPTH = 8  # references and alternatives are followed so deep


def types_of(schema: Mapping[str, Any]) -> dict[str, str]:
    """The types of each property of `schema`, joined by `|`; "" for what it does not say."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: "|".join(sorted(_types(value, schema, DEPTH))) for name, value in properties.items()}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {name for name in kind if isinstance(name, str)}
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return {TYPE_OF.get(type(value), "") for value in values}
    found: set[str] = set()
    for name in ("anyOf", "oneOf", "allOf"):
        members = schema.get(name)
        for member in members if isinstance(members, list) else ():
            found |= _types(member, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        found |= _types(resolve(reference, root), root, depth - 1)
    return found


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema points to, None when it points nowhere."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found
