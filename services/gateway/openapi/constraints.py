"""What `validation.py` enforces beyond types, written into the schemas of the requests.

Ranges, neutral values and lengths come from the very tables that the checks read: a document that says more or
less than the server does would be found by `make fuzz`.
"""

from services.gateway.batches.constraints import constrain_batches
from services.gateway.openapi.bounds import bound
from services.gateway.openapi.extra_constraints import TOKEN, constrain_extras, constrain_others
from services.gateway.openapi.narrowing import (
    NULL,
    REQUEST_ID_FIELD,
    Schema,
    given_needs,
    ignore,
    narrow,
    refuse,
)
from services.gateway.requests.messages import OTHER_PARTS, PARTS, ROLES
from services.gateway.requests.schemas import NEUTRAL, NEUTRAL_IN_MESSAGE
from services.gateway.requests.validation import LARGEST_BIAS, OPEN_BELOW, RANGES
from services.gateway.responses.constraints import constrain_responses
from shared import limits

REQUESTS = ("ChatCompletionRequest", "CompletionRequest")
"""Components to which the tables of `validation.py` apply."""


def constrain(components: dict[str, Schema]) -> None:
    """Narrows the request schemas among `components` to what is accepted, in place."""
    constrain_responses(components)
    constrain_batches(components)
    constrain_others(components)
    for name in REQUESTS:
        if name in components:
            _constrain_request(components[name])
    if "Message" in components:
        _constrain_message(components["Message"])
    if "CacheBreakpoint" in components:
        refuse(components["CacheBreakpoint"]["properties"], "ttl", ())
    if "ContentPart" in components:
        _constrain_part(components["ContentPart"])
    if "ChatCompletionRequest" in components:
        properties = components["ChatCompletionRequest"]["properties"]
        properties["messages"]["minItems"] = 1
        narrow(properties["max_tokens"], "integer", minimum=1)
    if "CompletionRequest" in components:
        properties = components["CompletionRequest"]["properties"]
        properties["prompt"] = _prompt()
        narrow(properties["logprobs"], "integer", minimum=0)
    bound(components)


def _constrain_request(schema: Schema) -> None:
    properties = schema["properties"]
    for name, low, high in RANGES:
        if name in properties:
            lower = "exclusiveMinimum" if name in OPEN_BELOW else "minimum"
            for kind in ("integer", "number"):
                narrow(properties[name], kind, **{lower: low, "maximum": high})
    for name, neutral in NEUTRAL.items():
        if name in properties:
            refuse(properties, name, neutral)
    ignore(properties)
    narrow(properties["request_id"], "string", **REQUEST_ID_FIELD)
    narrow(properties["model"], "string", minLength=1)
    narrow(properties["stop"], "string", minLength=1)
    narrow(properties["stop"], "array", items={"type": "string", "minLength": 1})
    narrow(properties["stop_token_ids"], "array", items=TOKEN)
    bias = {"type": "number", "minimum": -LARGEST_BIAS, "maximum": LARGEST_BIAS}
    names = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$"}
    narrow(properties["logit_bias"], "object", additionalProperties=bias, propertyNames=names)
    schema["allOf"] = [_streamed()]
    schema["allOf"] += [given_needs(*rule) for rule in _rules() if rule[0] in properties]
    schema["allOf"] += constrain_extras(properties)


def _streamed() -> Schema:
    """What goes with `stream`, and what without, as one rule: of some more Schemathesis can make no requests."""
    return {
        "if": {"required": ["stream"], "properties": {"stream": {"const": True}}},
        "then": {"properties": {"prompt_logprobs": NULL}},
        "else": {"properties": {"stream_options": NULL}},
    }


def _rules() -> list[tuple[str, Schema, Schema]]:
    """(a field, the values of it that have a condition, what the other fields must be then)."""
    given = {"not": NULL}
    true = {"const": True}
    none_of_them: Schema = {"enum": [None, []]}
    return [
        ("top_logprobs", given, {"logprobs": true}),
        (
            "min_tokens",
            {"type": "integer", "minimum": 1},
            {"ignore_eos": true, "stop": none_of_them, "stop_token_ids": none_of_them},
        ),
    ]


def _constrain_message(schema: Schema) -> None:
    properties = schema["properties"]
    properties["role"] = {"type": "string", "enum": list(ROLES)}
    parts = next(kind for kind in properties["content"]["anyOf"] if kind.get("type") == "array")
    properties["content"] = {"anyOf": [{"type": "string"}, parts | {"minItems": 1}, NULL], "default": None}
    calls = {"type": "array", "minItems": 1}
    schema["anyOf"] = [
        {"required": [name], "properties": {name: given}}
        for name, given in (
            ("content", {"not": NULL}),
            ("tool_calls", calls),
            ("function_call", {"not": NULL}),
            ("refusal", {"type": "string", "minLength": 1}),
        )
    ]
    for name, neutral in NEUTRAL_IN_MESSAGE.items():
        refuse(properties, name, neutral)


def _constrain_part(schema: Schema) -> None:
    properties = schema["properties"]
    properties["type"] = {"enum": list(PARTS)}
    schema["oneOf"] = [
        {
            "required": [kind],
            "properties": {"type": {"const": kind}, kind: {"type": "string"}}
            | {other: NULL for other in PARTS if other != kind},
        }
        for kind in PARTS
    ]
    for name in OTHER_PARTS:
        refuse(properties, name, ())


def _prompt() -> Schema:
    ids = {"type": "array", "items": TOKEN, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    many = {"type": "array", "minItems": 1, "maxItems": limits.CHOICES.value}
    return {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}
