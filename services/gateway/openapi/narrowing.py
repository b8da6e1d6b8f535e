"""Ways to say in JSON Schema what a check says in Python. Pure."""

from typing import Any

from services.gateway.requests.schemas import IGNORED

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
