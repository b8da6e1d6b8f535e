"""JSON types of a function's parameters, for families that write values without quotation marks. Pure."""

from collections.abc import Mapping
from typing import Any

from services.gateway.tools.parsers.types import TYPE_OF

DEPTH = 8
"""References and alternatives are followed so deep."""


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
