"""What checks say in Python, said in JSON Schema; and the rows of `shared/limits.py` that name a field. Pure."""

from typing import Any

from services.gateway.intake.schemas import IGNORED
from shared.limits import LIMITS, Limit

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
REQUEST_ID_FIELD: Schema = {"pattern": "^[!-~]{1,128}$", "maxLength": 128}
UNSUPPORTED = "Not supported: refused, unless its value asks for nothing."


def given_needs(field: str, values: Schema, others: Schema) -> Schema:
    """A field left out counts as null."""
    needed = [name for name, schema in others.items() if schema.get("const") is not None]
    return {
        "if": {"required": [field], "properties": {field: values}},
        "then": {"required": needed, "properties": others},
    }


def refuse(properties: dict[str, Schema], name: str, neutral: tuple[Any, ...]) -> None:
    properties[name] = {"description": UNSUPPORTED, **only(neutral)}


def ignore(properties: dict[str, Schema]) -> None:
    """Of all fields that change nothing."""
    for name in IGNORED:
        if name in properties:
            properties[name] = {
                "description": "Changes nothing here, and is named in x-ryzanstein-ignored-fields."
            }


def only(values: tuple[Any, ...]) -> Schema:
    return {"enum": [None, *values], "default": None}


def narrow(schema: Schema, kind: str, **keywords: Any) -> None:
    """Adds `keywords` where `schema` admits the type `kind`."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == kind:
            branch.update(keywords)


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
