"""What the checks of `extra_fields.py`, embeddings and tokens enforce beyond types, written into the schemas."""

from services.gateway.openapi.narrowing import NULL, Schema, given_needs, narrow
from services.gateway.requests import extra_fields
from shared import limits

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
