"""The rows of `shared/limits.py` that name a field, written into its schema. Pure."""

from services.gateway.openapi.narrowing import Schema
from shared.limits import LIMITS, Limit

_KEYWORDS = {
    ("entries", "array"): "maxItems",
    ("entries", "object"): "maxProperties",
    ("entries", "integer"): "maximum",
    ("characters", "string"): "maxLength",
}
_ELEMENTS = {"array": "items", "object": "additionalProperties"}


def bound(components: dict[str, Schema]) -> None:
    """Adds what the limits say to `components`, in place; these may be some of all there are."""
    for limit in LIMITS:
        for field in limit.fields:
            component, _, path = field.partition(".")
            schema = components.get(component, {}).get("properties", {}).get(path.rstrip("[]{}"))
            for branch in () if schema is None else schema.get("anyOf", [schema]):
                _bound_branch(branch, path, limit)


def _bound_branch(branch: Schema, path: str, limit: Limit) -> None:
    """`branch`: one of the types that the field may have."""
    kind = branch.get("type", "")
    if not path.endswith(("[]", "{}")):
        _narrow(branch, limit)
    elif kind in _ELEMENTS:
        name = "propertyNames" if path.endswith("{}") else _ELEMENTS[kind]
        inner = branch.get(name)
        if name == "propertyNames" and kind == "object":
            branch[name] = {"type": "string", **(inner or {})}
        elif isinstance(inner, dict):
            branch[name] = dict(inner)
        else:
            return
        _narrow(branch[name], limit)


def _narrow(schema: Schema, limit: Limit) -> None:
    keyword = _KEYWORDS.get((limit.unit, schema.get("type", "")))
    if keyword is not None:
        schema[keyword] = limit.value
