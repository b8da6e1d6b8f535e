"""Messages and stored records as bytes: each kind once, with every field filled by the field's name and type alone."""

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tests.interfaces.bus import kinds

RECORDED = Path(__file__).parent / "messages.msgpack"
_DEPTH = 4  # of structs within structs, below which lists and maps are empty


class Recorded(msgspec.Struct, frozen=True):
    """A kind of message as a release wrote it."""

    wire: bytes  # with every field filled
    required: list[str]  # fields without a default, which it cannot read a message without


def record() -> None:
    """Writes down what this release says."""
    told = {
        kind.__name__: Recorded(
            msgspec.msgpack.encode(filled(kind)), [one.name for one in msgspec.structs.fields(kind) if one.required]
        )
        for kind in kinds()
    }
    RECORDED.write_bytes(msgspec.msgpack.encode(told))


def recorded() -> dict[str, Recorded]:
    """What the previous release said, by the names of its kinds."""
    return msgspec.msgpack.decode(RECORDED.read_bytes(), type=dict[str, Recorded])


def filled(kind: type[msgspec.Struct], depth: int = 0) -> Any:
    """An instance with a value for each field, other than its default."""
    hints = get_type_hints(kind, include_extras=True)
    return kind(
        **{one.name: _value(hints[one.name], one.name, one.default, depth) for one in msgspec.structs.fields(kind)}
    )


def least(kind: type[msgspec.Struct]) -> Any:
    """An instance with its defaults, and a value for each field that has none."""
    hints = get_type_hints(kind, include_extras=True)
    return kind(
        **{
            one.name: _value(hints[one.name], one.name, None, _DEPTH)
            for one in msgspec.structs.fields(kind)
            if one.required
        }
    )


def _value(kind: Any, name: str, default: Any, depth: int) -> Any:
    simple = {str: name, bytes: name.encode(), int: len(name), float: len(name) + 0.5, bool: default is not True}
    simple |= {Any: None, msgspec.Raw: msgspec.Raw(msgspec.msgpack.encode(name))}
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return filled(kind, depth + 1) if depth < _DEPTH else least(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return next(value for value in reversed(arguments) if value != default)
    if origin in (Union, types.UnionType):
        return _value(next(one for one in arguments if one is not type(None)), name, default, depth)
    return _container(origin, arguments, name, depth)


def _container(origin: Any, arguments: tuple[Any, ...], name: str, depth: int) -> Any:
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_value(one, name, None, depth) for one in arguments)
    made = {list: list, Sequence: list, tuple: tuple, dict: dict}[origin]
    if depth >= _DEPTH:
        return made()
    values = [_value(one, name, None, depth + 1) for one in arguments if one is not Ellipsis]
    return made([tuple(values)] if made is dict else values)
