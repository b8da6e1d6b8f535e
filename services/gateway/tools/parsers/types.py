"""What parsers have in common."""

from collections.abc import Callable, Mapping

from services.gateway.tools.parsers.scanner import Scanner, Steps

Types = Mapping[str, Mapping[str, str]]
"""The tools by name: the JSON types of each parameter, joined by `|` (`string`, `integer|null`); "" when unknown."""

Machine = Callable[[Scanner, Types], Steps[None]]
"""Reads a whole answer."""

TYPE_OF: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""JSON's names for Python's types."""
