"""Objects of a JSON Schema, closed: without `additionalProperties` they have the named properties, and no others.

To JSON Schema such an object is open, and a model that has said all that it was asked for goes on with properties of
its own making, often to the end of its tokens. llama.cpp closes objects too. Pure.

    {"type": "object", "properties": {"age": {...}}}  ──▶  {..., "additionalProperties": false}

What says itself how open it is stays as it is: an object with `additionalProperties`, `patternProperties`,
`unevaluatedProperties` or `propertyNames`, one without `properties`, and one that demands properties which it does not
name. So do the parts that make one object together (`allOf` of several, `$ref` beside `properties` ...): each closed by
itself would leave none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from services.gateway.tool_calls.schemas import resolve

Schema = dict[str, Any]
_OPENNESS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "if", "then", "else")
_PARTS = ("allOf", "anyOf", "oneOf")


def closed(schema: Mapping[str, Any]) -> Schema:
    """A copy of `schema` with its objects closed."""
    root: Schema = msgspec.json.decode(msgspec.json.encode(schema))
    schemas = list(_schemas(root))
    open_: set[int] = set()
    for one in schemas:
        if _is_put_together(one):
            _keep_open(one, root, open_)
    for one in schemas:
        if id(one) not in open_ and _may_be_closed(one):
            one["additionalProperties"] = False
    return root


def _schemas(root: Schema) -> Iterator[Schema]:
    """`root`, and every schema within it."""
    waiting: list[Any] = [root]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield one
        for name in _NAMED:
            members = one.get(name)
            waiting += members.values() if isinstance(members, dict) else ()
        for name in _LISTED:
            members = one.get(name)
            waiting += members if isinstance(members, list) else ()
        waiting += (one.get(name) for name in _SINGLE)


def _is_put_together(schema: Schema) -> bool:
    """Whether several of its keywords, or of its parts, say what properties one object has."""
    says = sum(name in schema for name in ("properties", "$ref", "if", *_PARTS))
    several = schema.get("allOf")
    return says > 1 or (isinstance(several, list) and len(several) > 1)


def _keep_open(schema: Schema, root: Schema, open_: set[int]) -> None:
    """Adds `schema` and the parts of the object that it describes, those of parts too."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in open_:
            continue
        open_.add(id(one))
        for name in _PARTS:
            members = one.get(name)
            waiting += members if isinstance(members, list) else ()
        waiting += (one.get(name) for name in ("then", "else"))
        if isinstance(reference := one.get("$ref"), str):
            waiting.append(resolve(reference, root))


def _may_be_closed(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or any(name in schema for name in _OPENNESS):
        return False
    fewest = schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(fewest, int):
        return False
    return fewest <= len(properties) and all(name in properties for name in required if isinstance(name, str))
