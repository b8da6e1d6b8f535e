"""Ways to say in JSON Schema what a check says in Python. Pure."""

from typing import Any

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
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


def only(values: tuple[Any, ...]) -> Schema:
    return {"enum": [None, *values], "default": None}


def narrow(schema: Schema, kind: str, **keywords: Any) -> None:
    """Adds `keywords` where `schema` admits the type `kind`."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == kind:
            branch.update(keywords)
