"""What the checks of requests enforce beyond types, written into the schemas of the OpenAPI document.

Ranges, neutral values and lengths come from the very tables that the checks read: a document that says more or
less than the server does would be found by `make fuzz`.
"""

from services.gateway.api.openapi.narrowing import (
    NULL,
    REQUEST_ID_FIELD,
    Schema,
    bound,
    given_needs,
    ignore,
    narrow,
    only,
    refuse,
)
from services.gateway.batches.dependencies import URLS
from services.gateway.batches.files import ANCHOR, LEAST_EXPIRY, MOST_EXPIRY
from services.gateway.batches.states import WINDOW
from services.gateway.intake import extra_fields
from services.gateway.intake.responses.schemas import NEUTRAL as NEUTRAL_IN_RESPONSE
from services.gateway.intake.responses.validation import INCLUDABLE
from services.gateway.intake.schemas import NEUTRAL, NEUTRAL_IN_MESSAGE
from services.gateway.intake.validation import (
    LARGEST_BIAS,
    OPEN_BELOW,
    OTHER_PARTS,
    PARTS,
    PRIORITIES,
    RANGES,
    ROLES,
)
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


TOKEN: Schema = {"type": "integer", "minimum": 0}
LAST_TOKENS: Schema = {
    "anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**31}, NULL],
    "default": None,
}
_KEY: Schema = {"type": "string", "minLength": 1}
NOT_TRUE: Schema = {"enum": [None, False]}
ONE_MESSAGE = given_needs("continue_final_message", {"const": True}, {"add_generation_prompt": NOT_TRUE})


def constrain_extras(properties: dict[str, Schema]) -> list[Schema]:
    """Narrows the fields of a request for text, in place; what they demand of each other, for its `allOf`."""
    for name, known in (
        ("service_tier", tuple(extra_fields.TIERS)),
        ("prompt_cache_retention", extra_fields.RETENTIONS),
        ("verbosity", extra_fields.VERBOSITIES),
    ):
        if name in properties:
            narrow(properties[name], "string", enum=list(known))
    narrow(properties["metadata"], "object", propertyNames=_KEY)
    properties["truncate_prompt_tokens"] = LAST_TOKENS
    narrow(properties["allowed_token_ids"], "array", items=TOKEN, minItems=1)
    word = {"type": "string", "pattern": r"\S"}
    narrow(properties["bad_words"], "array", items=word)
    rules = [ONE_MESSAGE] if "continue_final_message" in properties else []
    if "best_of" in properties:
        narrow(properties["best_of"], "integer", minimum=1)
        rules.append(given_needs("best_of", {"type": "integer", "minimum": 2}, {"stream": NOT_TRUE}))
        rules.append(_nothing_needs_a_prompt())
    return rules


def _nothing_needs_a_prompt() -> Schema:
    """Who generates nothing wants to know something of the prompt."""
    ways = (("echo", {"const": True}), ("prompt_logprobs", {"type": "integer"}))
    return {
        "if": {"required": ["max_tokens"], "properties": {"max_tokens": {"const": 0}}},
        "then": {"anyOf": [{"required": [name], "properties": {name: given}} for name, given in ways]},
    }


def constrain_others(components: dict[str, Schema]) -> None:
    """As `constraints.constrain`, for the requests that make no text."""
    if "StreamOptions" in components:
        counted = given_needs("continuous_usage_stats", {"const": True}, {"include_usage": {"const": True}})
        components["StreamOptions"]["allOf"] = [counted]
    if "EmbeddingRequest" in components:
        _constrain_embedding(components["EmbeddingRequest"]["properties"])
    if "TokenizeRequest" in components:
        _constrain_tokenize(components["TokenizeRequest"])
    if "ChangedChat" in components:
        narrow(components["ChangedChat"]["properties"]["metadata"], "object", propertyNames=_KEY)
    if "DetokenizeRequest" in components:
        narrow(components["DetokenizeRequest"]["properties"]["tokens"], "array", items=TOKEN)


def _constrain_embedding(properties: dict[str, Schema]) -> None:
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "items": TOKEN, "minItems": 1}
    many: Schema = {"type": "array", "minItems": 1, "maxItems": limits.EMBEDDING_INPUTS.value}
    properties["input"] = {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}
    narrow(properties["dimensions"], "integer", minimum=1)
    properties["truncate_prompt_tokens"] = LAST_TOKENS


def _constrain_tokenize(schema: Schema) -> None:
    narrow(schema["properties"]["messages"], "array", minItems=1)
    ways = (("prompt", {"type": "string"}, "messages"), ("messages", {"type": "array"}, "prompt"))
    schema["oneOf"] = [
        {"required": [name], "properties": {name: given, other: NULL}} for name, given, other in ways
    ]
    schema["allOf"] = [ONE_MESSAGE]


def constrain_batches(components: dict[str, Schema]) -> None:
    """As `openapi.constraints.constrain`."""
    if "BatchCreate" in components:
        properties = components["BatchCreate"]["properties"]
        properties["endpoint"] = {"type": "string", "enum": list(URLS)}
        narrow(properties["completion_window"], "string", pattern=f"^(?=0*[1-9]){WINDOW}$")
    if "ExpiresAfter" in components:
        properties = components["ExpiresAfter"]["properties"]
        narrow(properties["seconds"], "integer", minimum=LEAST_EXPIRY, maximum=MOST_EXPIRY)
        properties["anchor"] = {"const": ANCHOR, "default": ANCHOR}


TRUNCATION = (None, "auto", "disabled")
REASONING = {"summary": (), "generate_summary": (), "context": ("auto",), "mode": ("standard",)}


def constrain_responses(components: dict[str, Schema]) -> None:
    """As `openapi.constraints.constrain`."""
    for name in ("ResponseRequest", "InputTokensRequest"):
        if name in components:
            _constrain_input(components[name])
    if "ReasoningOptions" in components:
        for field, neutral in REASONING.items():
            refuse(components["ReasoningOptions"]["properties"], field, neutral)
    if "ResponseRequest" in components:
        _constrain_response(components["ResponseRequest"])


def _constrain_input(schema: Schema) -> None:
    properties = schema["properties"]
    for name, neutral in NEUTRAL_IN_RESPONSE.items():
        if name in properties:
            refuse(properties, name, neutral)
    narrow(properties["model"], "string", minLength=1)
    narrow(properties["input"], "array", minItems=1)
    properties["truncation"] = {"enum": list(TRUNCATION), "default": None}
    either = {"input": {"not": NULL}, "previous_response_id": {"type": "string", "minLength": 1}}
    schema["anyOf"] = [{"required": [name], "properties": {name: given}} for name, given in either.items()]


def _constrain_response(schema: Schema) -> None:
    properties = schema["properties"]
    for name in ("max_output_tokens", "max_tool_calls"):
        narrow(properties[name], "integer", minimum=1, maximum=2**31)
    narrow(properties["top_logprobs"], "integer", minimum=0)
    narrow(properties["temperature"], "number", minimum=0, maximum=2)
    narrow(properties["top_p"], "number", exclusiveMinimum=0, maximum=1)
    narrow(properties["include"], "array", items={"type": "string", "enum": list(INCLUDABLE)})
    narrow(properties["priority"], "integer", minimum=PRIORITIES[0], maximum=PRIORITIES[1])
    narrow(properties["request_id"], "string", **REQUEST_ID_FIELD)
    ignore(properties)
    options = {"include_usage": only((False,)), "include_obfuscation": only((False,))}
    properties["stream_options"] = {
        "anyOf": [{"type": "object", "properties": options, "additionalProperties": False}, NULL],
        "default": None,
    }
    schema["allOf"] = [
        given_needs("stream_options", {"not": NULL}, {"stream": {"const": True}}),
        given_needs("background", {"const": True}, {"store": {"enum": [None, True]}}),
    ]
