"""The parameters and response fields of OpenAI's API, as the installed official package defines them.

    TypedDict, or union of them ─▶ messages[role=user].content[type=text].text      one path per field
    pydantic model              ─▶ choices[].message.content

Nested objects are walked too. Members of a union are told apart by the field that names their kind (`type`, `role`,
`object`); where nothing does, their fields are taken together.
"""

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pydantic
import typing_extensions

# Fields that tell the members of a union apart, the likeliest first.
KINDS = ("type", "role", "object", "mode", "anchor")
DEPTH = 7
_WRAPPERS = (typing.Required, typing.NotRequired, typing_extensions.Required, typing_extensions.NotRequired)


class Parameter(NamedTuple):
    """A field somewhere in a request."""

    path: str
    parents: tuple["Step", ...]  # how one gets to the object that has it
    name: str
    kind: Any  # the annotation, without wrappers

    @property
    def names_its_member(self) -> bool:
        """Whether it says which member of a union its object is: another value would make another object."""
        return bool(self.parents) and f"[{self.name}=" in self.path

    @property
    def top(self) -> str:
        """The request's own field that it is in."""
        return self.path.split(".")[0].split("[")[0]


class Step(NamedTuple):
    """From an object to one that it holds."""

    name: str
    is_list: bool
    member: Any  # the TypedDict


def bare(kind: Any) -> Any:
    """`kind` without Required, Annotated, Optional and the like."""
    while True:
        origin = typing.get_origin(kind)
        if origin in _WRAPPERS or origin is typing.Annotated or origin is typing_extensions.Annotated:
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
            kind = kind.__value__
        else:
            return kind


def members(kind: Any) -> list[Any]:
    """The alternatives of `kind`, None aside."""
    kind = bare(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(kind) for one in members(part)]
    return [] if kind is type(None) else [kind]


def literals(kind: Any) -> tuple[Any, ...]:
    """The values that `kind` lists; none where it is no Literal."""
    found: list[Any] = []
    for one in members(kind):
        if typing.get_origin(one) in (typing.Literal, typing_extensions.Literal):
            found += typing.get_args(one)
    return tuple(found)


def element(kind: Any) -> Any | None:
    """What a list, or whatever else is repeated, holds; None where `kind` is none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or not arguments:
        return None
    name = getattr(origin, "__name__", "")
    return arguments[0] if name in ("list", "Iterable", "Sequence", "SequenceNotStr") else None


def is_object(kind: Any) -> bool:
    """Whether it is a TypedDict."""
    return typing_extensions.is_typeddict(kind)


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a TypedDict, with their annotations."""
    return typing_extensions.get_type_hints(kind, include_extras=True)


def required(kind: Any) -> frozenset[str]:
    """The names of a TypedDict's fields that must be there."""
    hints = fields_of(kind)
    marked = {name for name, hint in hints.items() if _is_required(hint)}
    return frozenset(marked | (set(kind.__required_keys__) & hints.keys()))


def _is_required(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Required, typing_extensions.Required)


def label(kind: Any, beside: Iterable[Any]) -> str:
    """What sets a TypedDict apart from the others of its union, as `name=value`; empty where nothing does."""
    if len(list(beside)) < 2:
        return ""
    hints = fields_of(kind)
    for name in KINDS:
        if values := literals(hints.get(name, Any)):
            return f"{name}={values[0]}"
    return ""


def parameters(*kinds: Any) -> list[Parameter]:
    """All fields of a request that is one of the TypedDicts `kinds`, nested ones behind those they are in."""
    found: dict[str, Parameter] = {}
    for kind in kinds:
        for one in _walk(kind, "", (), ()):
            found.setdefault(one.path, one)
    return list(found.values())


def _walk(kind: Any, prefix: str, parents: tuple[Step, ...], above: tuple[Any, ...]) -> Iterator[Parameter]:
    if kind in above or len(above) >= DEPTH:
        return
    for name, hint in fields_of(kind).items():
        yield Parameter(prefix + name, parents, name, bare(hint))
        for is_list, objects in _objects(hint):
            for one in objects:
                which = label(one, objects)
                path = f"{prefix}{name}[{which}]" if which else prefix + name + ("[]" if is_list else "")
                step = Step(name, is_list, one)
                yield from _walk(one, path + ".", (*parents, step), (*above, kind))


def _objects(hint: Any) -> Iterator[tuple[bool, list[Any]]]:
    """(whether they are in a list, the TypedDicts) that a field may hold."""
    plain = [one for one in members(hint) if is_object(one)]
    if plain:
        yield False, plain
    for one in members(hint):
        inner = element(one)
        if inner is not None and (held := [kind for kind in members(inner) if is_object(kind)]):
            yield True, held


# --- answers -------------------------------------------------------------------------------------


def response_fields(kind: Any, prefix: str = "", above: tuple[Any, ...] = ()) -> list[str]:
    """The paths of a pydantic model's fields, nested ones behind those they are in."""
    found: dict[str, None] = {}
    for one in members(kind):
        inner = element(one)
        if inner is not None:
            found |= dict.fromkeys(response_fields(inner, prefix.removesuffix(".") + "[].", above))
        elif isinstance(one, type) and issubclass(one, pydantic.BaseModel) and one not in above and len(above) < DEPTH:
            for name, field in one.model_fields.items():
                found[prefix + name] = None
                found |= dict.fromkeys(response_fields(field.annotation, f"{prefix}{name}.", (*above, one)))
    return list(found)


def seen_in(answer: Any, prefix: str = "") -> Iterator[str]:
    """The paths of a JSON answer."""
    if isinstance(answer, list):
        for item in answer:
            yield from seen_in(item, prefix.removesuffix(".") + "[].")
    elif isinstance(answer, dict):
        for name, value in answer.items():
            yield prefix + name
            yield from seen_in(value, f"{prefix}{name}.")


def event_types(union: Any) -> list[str]:
    """The `type` of each member of a union of stream events."""
    found = []
    for one in members(union):
        found += [str(value) for value in literals(one.model_fields["type"].annotation)]
    return sorted(set(found))
