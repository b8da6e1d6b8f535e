"""Tools of a response's request, and the chat's tools that they become. Pure.

tools[0]  function "f"                       ──▶ tools[0]  "f"
tools[1]  web_search                         ──▶ none: there is no search here, and the client is told
tools[2]  namespace "crm", of "get", "put"   ──▶ tools[1]  "crm__get", tools[2] "crm__put"
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.core.errors import InvalidParameter, convert, renamed, unsupported
from services.gateway.dialects.responses.stream.items import NAMESPACE, qualified
from services.gateway.intake.validation import asks_for_nothing
from services.gateway.tool_calls.schemas import ToolNameText

Tools = Sequence[dict[str, Any]] | None
TOOL_TYPES = ("function", "custom")
# Beginning of the types of a search that OpenAI runs. A model without it answers from what it knows; agents name it as
# one tool of many, whatever server they speak to.
WEB_SEARCH = "web_search"
# Fields of an entry of `tools` that are not supported, with the values that ask for nothing.
NEUTRAL_IN_TOOL: dict[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],), "async": (False,)}
IGNORED_IN_TOOL = ("defer_loading",)  # fields that change nothing: every tool is told to the model at once


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tools of one origin."""

    type: str
    name: ToolNameText
    tools: list[dict[str, Any]]
    description: str | None = None


class PlacedTool(NamedTuple):
    """A tool that the model is told of, and where it stands in the request."""

    path: str
    tool: dict[str, Any]


def placed_tools(tools: Tools) -> Iterator[PlacedTool]:
    """The functions and custom tools, in order; those of a namespace under their qualified names. Raises
    `InvalidParameter` for a namespace that is none, and for a tool that is not supported."""
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        if tool.get("type") == NAMESPACE:
            yield from _of_namespace(tool, path)
        elif not _is_search(tool):
            yield PlacedTool(path, _checked(tool, path))


def _of_namespace(tool: dict[str, Any], path: str) -> Iterator[PlacedTool]:
    with renamed({}, path, place_of=lambda param: f"{path}.{param}"):
        namespace = convert(tool, Namespace)
    for index, member in enumerate(namespace.tools):
        place = f"{path}.tools[{index}]"
        checked = _checked(member, place)
        name = checked.get("name")
        shown = qualified(namespace.name, name) if isinstance(name, str) else name
        yield PlacedTool(place, {**checked, "name": shown})


def _checked(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in TOOL_TYPES:
        raise InvalidParameter(
            f"Invalid value: '{str(kind)[:64]}'. This server has no tools of its own; supported values are: "
            f"'function', 'custom' and '{NAMESPACE}', and '{WEB_SEARCH}' is ignored.",
            param=f"{path}.type",
        )
    for name, values in NEUTRAL_IN_TOOL.items():
        value = tool.get(name)
        if value is not None and not asks_for_nothing(value, values):
            raise unsupported(f"{path}.{name}")
    return tool


def _is_search(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and (kind == WEB_SEARCH or kind.startswith(f"{WEB_SEARCH}_"))


def ignored_in_tools(tools: Tools) -> list[str]:
    """What of `tools` changes nothing, by its place: searches, descriptions of namespaces, `IGNORED_IN_TOOL`. Raises as
    `placed_tools`."""
    ignored = []
    for index, tool in enumerate(tools or ()):
        if _is_search(tool):
            ignored.append(f"tools[{index}].{tool['type']}")
        elif tool.get("type") == NAMESPACE and tool.get("description"):
            ignored.append(f"tools[{index}].description")
    for path, tool in placed_tools(tools):
        ignored += (f"{path}.{name}" for name in IGNORED_IN_TOOL if tool.get(name))
    return ignored


def chat_tools(tools: Tools) -> list[dict[str, Any]] | None:
    """Raises as `placed_tools`."""
    return None if tools is None else [_nested(tool) for _, tool in placed_tools(tools)]


def chat_tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """`tool_choice` as chats have it."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type", "function")
    if kind in TOOL_TYPES:
        return _nested(_qualified({"type": kind, **choice}))
    if kind != "allowed_tools":
        return {"type": kind}  # which is refused, whatever else there is
    allowed: dict[str, Any] = {"mode": choice.get("mode")}
    given = choice.get("tools")
    allowed["tools"] = [_nested(_qualified(tool)) for tool in given] if isinstance(given, list) else given
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _qualified(choice: Any) -> Any:
    """What is chosen, under the name by which the model knows it."""
    match choice:
        case {"namespace": str(namespace), "name": str(name), **others}:
            return {**others, "name": qualified(namespace, name)}
    return choice


def _nested(tool: Any) -> Any:
    """A tool as chat completions have it: its members in an object of their own, as those of a grammar are."""
    if not isinstance(tool, dict) or (kind := tool.get("type")) not in TOOL_TYPES:
        return tool
    members = {
        name: value
        for name, value in tool.items()
        if name != "type" and name not in NEUTRAL_IN_TOOL and name not in IGNORED_IN_TOOL and value is not None
    }
    form = members.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {name: value for name, value in form.items() if name != "type"}
        members["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: members}
