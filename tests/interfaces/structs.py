"""Structs as lines: what MessagePack or JSON of them holds, and what a reader demands. Pure."""

import types
from collections.abc import Iterable, Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec


def fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    """A line for each field: by position where the struct is an array, else by name; with its type and its default."""
    config = kind.__struct_config__
    if config.tag is not None:
        yield f"{kind.__name__}: {config.tag_field} = {config.tag!r}"
    hints = get_type_hints(kind)
    for position, field in enumerate(msgspec.structs.fields(kind)):
        place = f"[{position}] {field.name}" if config.array_like else f".{field.encode_name}"
        yield f"{kind.__name__}{place}: {type_name(hints[field.name])}{_default(field)}"


def reached(kinds: Iterable[Any]) -> list[type[msgspec.Struct]]:
    """The structs that the types name, and those that they name in turn, by their names."""
    found: set[type[msgspec.Struct]] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in found:
                found.add(kind)
                waiting += get_type_hints(kind).values()
        else:
            waiting += get_args(kind)
    return sorted(found, key=lambda kind: (kind.__name__, kind.__module__))


def type_name(kind: Any) -> str:
    """As it is written in Python, with names for types alone."""
    if kind is None or kind is type(None):
        return "None"
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    arguments = get_args(kind)
    if get_origin(kind) in (types.UnionType, Union):
        return " | ".join(map(type_name, arguments))
    if arguments and all(not isinstance(one, type) and isinstance(one, str | int | bool) for one in arguments):
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if arguments:
        return f"{getattr(get_origin(kind), '__name__', kind)}[{', '.join(map(type_name, arguments))}]"
    return "..." if kind is Ellipsis else str(kind).removeprefix("typing.")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    if field.default is not msgspec.NODEFAULT:
        return f" = {field.default!r}"
    made = field.default_factory()
    return f" = {made!r}" if isinstance(made, list | dict | set | tuple) else f" = {type(made).__name__}()"
