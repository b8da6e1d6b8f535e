"""What `validation.py` enforces beyond types, written into the schemas of the requests.

Ranges, neutral values and lengths come from the very tables that the checks read: a document that says more or
less than the server does would be found by `make fuzz`.
"""

from typing import Any

from services.gateway.schemas import NEUTRAL, NEUTRAL_IN_MESSAGE
from services.gateway.validation import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOPS,
    OPEN_BELOW,
    OTHER_PARTS,
    RANGES,
    ROLES,
)

Schema = dict[str, Any]

REQUESTS = ("ChatCompletionRequest", "CompletionRequest")
"""Components to which the tables of `validation.py` apply."""
NULL: Schema = {"type": "null"}
TOKEN: Schema = {"type": "integer", "minimum": 0}
UNSUPPORTED = "Not supported: refused, unless its value asks for nothing."


def constrain(components: dict[str, Schema]) -> None:
    """Narrows the request schemas among `components` to what is accepted, in place."""
    for name in REQUESTS:
        if name in components:
            _constrain_request(components[name])
    if "Message" in components:
        _constrain_message(components["Message"])
    if "ContentPart" in components:
        _constrain_part(components["ContentPart"])
    if "StreamOptions" in components:
        components["StreamOptions"]["properties"]["include_obfuscation"] |= _only((False,))
    if "ChatCompletionRequest" in components:
        components["ChatCompletionRequest"]["properties"]["messages"]["minItems"] = 1
    if "CompletionRequest" in components:
        properties = components["CompletionRequest"]["properties"]
        properties["prompt"] = _prompt()
        _narrow(properties["logprobs"], "integer", minimum=0, maximum=MAX_LOGPROBS)


def _constrain_request(schema: Schema) -> None:
    properties = schema["properties"]
    for name, low, high in RANGES:
        if name in properties:
            lower = "exclusiveMinimum" if name in OPEN_BELOW else "minimum"
            for kind in ("integer", "number"):
                _narrow(properties[name], kind, **{lower: low, "maximum": high})
    for name, neutral in NEUTRAL.items():
        if name in properties:
            _refuse(properties, name, neutral)
    _narrow(properties["model"], "string", minLength=1)
    _narrow(properties["stop"], "string", minLength=1)
    _narrow(properties["stop"], "array", maxItems=MAX_STOPS, items={"type": "string", "minLength": 1})
    _narrow(properties["stop_token_ids"], "array", items=TOKEN)
    bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    names = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$"}
    _narrow(properties["logit_bias"], "object", additionalProperties=bias, propertyNames=names)
    schema["allOf"] = [_given_needs(*rule) for rule in _rules() if rule[0] in properties]


def _rules() -> list[tuple[str, Schema, Schema]]:
    """(a field, the values of it that have a condition, what the other fields must be then)."""
    given = {"not": NULL}
    true = {"const": True}
    none_of_them: Schema = {"enum": [None, []]}
    return [
        ("stream_options", given, {"stream": true}),
        ("top_logprobs", given, {"logprobs": true}),
        (
            "min_tokens",
            {"type": "integer", "minimum": 1},
            {"ignore_eos": true, "stop": none_of_them, "stop_token_ids": none_of_them},
        ),
    ]


def _given_needs(field: str, values: Schema, others: Schema) -> Schema:
    """A field left out counts as null."""
    needed = [name for name, schema in others.items() if schema.get("const") is not None]
    return {
        "if": {"required": [field], "properties": {field: values}},
        "then": {"required": needed, "properties": others},
    }


def _constrain_message(schema: Schema) -> None:
    properties = schema["properties"]
    properties["role"] = {"type": "string", "enum": list(ROLES)}
    parts = next(kind for kind in properties["content"]["anyOf"] if kind.get("type") == "array")
    properties["content"] = {"anyOf": [{"type": "string"}, parts | {"minItems": 1}]}
    schema["required"] = sorted({*schema["required"], "content"})
    for name, neutral in NEUTRAL_IN_MESSAGE.items():
        _refuse(properties, name, neutral)


def _constrain_part(schema: Schema) -> None:
    properties = schema["properties"]
    schema["required"] = ["type", "text"]
    properties["type"] = {"const": "text"}
    properties["text"] = {"type": "string"}
    for name in OTHER_PARTS:
        _refuse(properties, name, ())


def _prompt() -> Schema:
    ids = {"type": "array", "items": TOKEN, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    many = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}
    return {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}


def _refuse(properties: dict[str, Schema], name: str, neutral: tuple[Any, ...]) -> None:
    properties[name] = {"description": UNSUPPORTED, **_only(neutral)}


def _only(values: tuple[Any, ...]) -> Schema:
    return {"enum": [None, *values], "default": None}


def _narrow(schema: Schema, kind: str, **keywords: Any) -> None:
    """Adds `keywords` where `schema` admits the type `kind`."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == kind:
            branch.update(keywords)
