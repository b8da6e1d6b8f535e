"""Tools, their choice and response formats: from protobuf to what the REST API decodes from JSON. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.core.errors import InvalidField, InvalidParameter, missing

Fields = dict[str, Any]
_object = msgspec.json.Decoder(Fields)


def object_in(text: str, name: str, wanted: str = "a JSON Schema") -> dict[str, Any]:
    """The object that a field has as JSON text. Raises `InvalidParameter`."""
    try:
        return _object.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidField(
            name, f"it is not a JSON object ({why}); send {wanted} as JSON text.", reason="invalid_json"
        ) from None


_MODES = {
    pb.TOOL_MODE_UNSPECIFIED: "auto",
    pb.TOOL_MODE_AUTO: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_REQUIRED: "required",
}
_NAME = "answer"


def tools_of(given: Sequence[pb.Tool]) -> list[Fields] | None:
    """Raises `InvalidParameter`."""
    return [_tool(f"tools[{index}].function", tool) for index, tool in enumerate(given)] or None


def _tool(path: str, tool: pb.Tool) -> Fields:
    if not tool.HasField("function"):
        raise missing(path, "the function that may be called")
    given = tool.function
    text = given.parameters_json
    function = {
        "name": given.name,
        "description": given.description if given.HasField("description") else None,
        "parameters": object_in(text, f"{path}.parameters_json") if text else None,
        "strict": given.strict if given.HasField("strict") else None,
    }
    return {"type": "function", "function": function}


def choice_of(given: pb.ToolChoice) -> str | Fields:
    """Raises `InvalidParameter`."""
    kind = given.WhichOneof("choice")
    if kind is None:
        raise missing("tool_choice.choice", "mode, function or allowed")
    if kind == "mode":
        return _mode("tool_choice.mode", given.mode)
    if kind == "function":
        return {"type": "function", "function": {"name": given.function}}
    allowed = given.allowed
    tools = [{"type": "function", "function": {"name": name}} for name in allowed.functions]
    mode = _mode("tool_choice.allowed.mode", allowed.mode)
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _mode(path: str, mode: pb.ToolMode) -> str:
    if mode not in _MODES:
        raise InvalidParameter(f"Invalid value for '{path}': {mode} is not a ToolMode.", param=path)
    return _MODES[mode]


def calls_of(given: Sequence[pb.ToolCall]) -> list[Fields] | None:
    """The calls of an assistant's message."""
    return [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in given] or None


def format_of(request: pb.ChatRequest | pb.GenerateRequest) -> dict[str, Any]:
    """The field of the REST API that says the same. Raises `InvalidParameter`."""
    if not request.HasField("response_format"):
        return {}
    given = request.response_format
    kind = given.WhichOneof("format")
    if kind is None:
        raise missing("response_format.format", "json_object, json_schema, regex, grammar or choice")
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind == "json_schema":
        return {"response_format": {"type": kind, "json_schema": _schema(given.json_schema)}}
    wanted: Fields = {kind: list(given.choice.texts) if kind == "choice" else getattr(given, kind)}
    return {"structured_outputs": wanted}


def _schema(given: pb.JsonSchema) -> Fields:
    path = "response_format.json_schema.schema_json"
    if not given.schema_json:
        raise missing(path, "a JSON Schema as JSON text")
    return {
        "name": given.name if given.HasField("name") else _NAME,
        "description": given.description if given.HasField("description") else None,
        "schema": object_in(given.schema_json, path),
    }
