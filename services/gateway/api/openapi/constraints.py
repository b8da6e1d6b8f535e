"""What fields of a request demand of each other, written into the schemas of the OpenAPI document. Pure.

What a field may be by itself comes from its type. A document that says more or less than the server does would be
found by `make fuzz`.
"""

from typing import Any

from services.gateway.intake.embeddings import OF_VECTORS
from shared import limits

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
GIVEN: Schema = {"not": NULL}
TRUE: Schema = {"const": True}
NOT_TRUE: Schema = {"enum": [None, False]}


def given_needs(field: str, values: Schema, others: Schema) -> Schema:
    """Where `field` has one of `values`, `others` are so. A field left out counts as null."""
    needed = [name for name, schema in others.items() if schema.get("const") is not None]
    return {
        "if": {"required": [field], "properties": {field: values}},
        "then": {"required": needed, "properties": others},
    }


def _either(ways: Schema) -> list[Schema]:
    return [{"required": [name], "properties": {name: given}} for name, given in ways.items()]


def _one_of(ways: Schema) -> list[Schema]:
    """The field of one way alone."""
    return [
        {"required": [name], "properties": {name: given} | {other: NULL for other in ways if other != name}}
        for name, given in ways.items()
    ]


_STREAMED: Schema = {
    "if": {"required": ["stream"], "properties": {"stream": TRUE}},
    "then": {"properties": {"prompt_logprobs": NULL}},
    "else": {"properties": {"stream_options": NULL}},
}
"""What goes with `stream`, and what without, as one rule: of some more Schemathesis can make no requests."""
_NONE: Schema = {"enum": [None, []]}
_MIN_TOKENS = given_needs(
    "min_tokens",
    {"type": "integer", "minimum": 1},
    {"ignore_eos": TRUE, "stop": _NONE, "stop_token_ids": _NONE},
)
_ONE_MESSAGE = given_needs("continue_final_message", TRUE, {"add_generation_prompt": NOT_TRUE})
_NOTHING_NEEDS_A_PROMPT: Schema = {
    "if": {"required": ["max_tokens"], "properties": {"max_tokens": {"const": 0}}},
    "then": {"anyOf": _either({"echo": TRUE, "prompt_logprobs": {"type": "integer"}})},
}
"""Who generates nothing wants to know something of the prompt."""
_INPUT: Schema = {
    "anyOf": _either({"input": GIVEN, "previous_response_id": {"type": "string", "minLength": 1}})
}
_EMBEDDED: Schema = {"oneOf": _one_of({"input": GIVEN, "messages": {"type": "array"}})}
_TEXTS, _QUERIES = ("text_1", "text_2"), ("queries", "documents")
_PARTS: Schema = {"text": {"type": "string"}, "refusal": {"type": "string"}}

RULES: dict[str, Schema] = {
    "ChatCompletionRequest": {
        "allOf": [
            _STREAMED,
            given_needs("top_logprobs", GIVEN, {"logprobs": TRUE}),
            _MIN_TOKENS,
            _ONE_MESSAGE,
        ]
    },
    "CompletionRequest": {
        "allOf": [
            _STREAMED,
            _MIN_TOKENS,
            given_needs("best_of", {"type": "integer", "minimum": 2}, {"stream": NOT_TRUE}),
            _NOTHING_NEEDS_A_PROMPT,
        ]
    },
    "Message": {
        "anyOf": _either(
            {
                "content": GIVEN,
                "tool_calls": {"type": "array", "minItems": 1},
                "function_call": GIVEN,
                "refusal": {"type": "string", "minLength": 1},
            }
        )
    },
    "ContentPart": {
        "oneOf": [
            way | {"properties": {"type": {"const": kind}} | way["properties"]}
            for kind, way in zip(_PARTS, _one_of(_PARTS), strict=True)
        ]
    },
    "StreamOptions": {"allOf": [given_needs("continuous_usage_stats", TRUE, {"include_usage": TRUE})]},
    "EmbeddingRequest": _EMBEDDED,
    "PoolingRequest": _EMBEDDED
    | {"allOf": [given_needs("task", {"const": "classify"}, dict.fromkeys(OF_VECTORS, NULL))]},
    "TokenizeRequest": {
        "oneOf": _one_of({"prompt": {"type": "string"}, "messages": {"type": "array"}}),
        "allOf": [_ONE_MESSAGE],
    },
    "ScoreRequest": {
        "oneOf": [
            {
                "required": list(names),
                "properties": dict.fromkeys(names, GIVEN) | dict.fromkeys(others, NULL),
            }
            for names, others in ((_TEXTS, _QUERIES), (_QUERIES, _TEXTS))
        ]
    },
    "InputTokensRequest": _INPUT,
    "ResponseRequest": _INPUT
    | {
        "allOf": [
            given_needs("stream_options", GIVEN, {"stream": TRUE}),
            given_needs("background", TRUE, {"store": {"enum": [None, True]}}),
        ]
    },
}
"""By component."""
_NAMED = {"anyOf": _either({name: {"type": "string", "minLength": 1} for name in ("model", "name")})}
RULES |= {f"Ollama{name}Request": _NAMED for name in ("Show", "Delete", "Pull", "Create")}


TEXTS_OR_IDS = (
    ("CompletionRequest", "prompt", limits.CHOICES),
    ("EmbeddingRequest", "input", limits.EMBEDDING_INPUTS),
    ("ClassifyRequest", "input", limits.EMBEDDING_INPUTS),
    ("PoolingRequest", "input", limits.EMBEDDING_INPUTS),
)
"""A string, strings, token ids or lists of token ids: no type in Python says that these are not mixed."""


NAMELESS = (
    *("ChatCompletionRequest", "ClassifyRequest", "CompletionRequest", "EmbeddingRequest"),
    *("MessagesRequest", "RerankRequest", "ResponseRequest", "ScoreRequest", "PoolingRequest"),
    *("CompactRequest", "CountTokensRequest", "InputTokensRequest"),
)
"""Bodies that need not name their model where one is served."""


def _texts_or_ids(most: int) -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    many: Schema = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}


def constrain(components: dict[str, Schema]) -> None:
    """Adds the rules to the request schemas among `components`, in place."""
    for name, field, most in TEXTS_OR_IDS:
        if name in components:
            texts = _texts_or_ids(most.value)
            needed = field in components[name].get("required", ())
            components[name]["properties"][field] = texts if needed else {"anyOf": [*texts["anyOf"], NULL]}
    for name in NAMELESS:
        if name in components:
            shown = components[name]
            shown["required"] = [field for field in shown.get("required", ()) if field != "model"]
            shown["properties"]["model"] = {"anyOf": [shown["properties"]["model"], NULL]}
            shown["additionalProperties"] = NULL  # an unknown field that is null counts as not given
    for name in RULES.keys() & components.keys():
        components[name] |= RULES[name]
