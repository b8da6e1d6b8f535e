"""Fields that are declared and do nothing here: refused by name, or named to the client.

neutral    refused, unless its value asks for nothing
ignored    named in a header of the answer, or refused where the settings say so
"""

from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.core.errors import asks_for_nothing, unsupported


def neutral(*values: Any, why: str = "leave it out") -> Meta:
    """Of a field that is not supported: `values` and null ask for nothing, any other is refused. `why`: and what to do
    instead."""
    return Meta(
        description="Not supported: refused, unless its value asks for nothing.",
        extra={"neutral": values, "why": why},
        extra_json_schema={"enum": [None, *values]},
    )


def ignored(*values: Any) -> Meta:
    """Of a field that changes nothing here: any value but `values` and null is named to the client, or refused where
    the settings say so."""
    return Meta(
        description="Has no effect here; named in x-ryzanstein-ignored-fields.",
        extra={"ignored": values},
    )


@cache
def marked(kind: type[msgspec.Struct], mark: Literal["neutral", "ignored", "why"]) -> dict[str, Any]:
    """The fields of `kind` that are marked so, with the values that ask for nothing, or why others are refused."""
    return {
        field.name: meta.extra[mark]
        for field in msgspec.structs.fields(kind)
        for meta in getattr(field.type, "__metadata__", ())
        if mark in (meta.extra or {})
    }


def check_neutral(given: msgspec.Struct, path: str = "") -> None:
    """Raises `InvalidParameter` for the first field of `given`, which stands at `path`, that is not supported."""
    for name, values in marked(type(given), "neutral").items():
        value = getattr(given, name)
        if value is not None and not asks_for_nothing(value, values):
            raise unsupported(path + name, marked(type(given), "why")[name])


def checked_fields(given: msgspec.Struct | None, path: str = "") -> list[str]:
    """The fields of `given`, which stands at `path`, that change nothing. Raises `InvalidParameter` for the first that
    is not supported."""
    if given is None:
        return []
    check_neutral(given, path)
    names = ignored_fields(given)
    return [path + name for name in names] if names else names


def ignored_fields(request: msgspec.Struct) -> list[str]:
    """Fields of `request` that change nothing and are not neutral either."""
    found = []
    for name, neutral in marked(type(request), "ignored").items():
        value = getattr(request, name)
        if value is not None and not asks_for_nothing(value, neutral):
            found.append(name)
    return found
