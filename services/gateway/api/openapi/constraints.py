"""What types in Python cannot say, written into the schemas of the OpenAPI document. Pure.

What fields demand of each other are the rules of their struct (`intake/rules.py`). A document that says more or less
than the server does would be found by `make fuzz`.
"""

from services.gateway.intake.rules import NULL, Schema, schema_of, table
from shared import limits

# A string, strings, token ids or lists of token ids: no type in Python says that these are not mixed.
TEXTS_OR_IDS = (
    ("CompletionRequest", "prompt", limits.CHOICES),
    ("EmbeddingRequest", "input", limits.EMBEDDING_INPUTS),
    ("ClassifyRequest", "input", limits.EMBEDDING_INPUTS),
    ("PoolingRequest", "input", limits.EMBEDDING_INPUTS),
)


# Bodies that need not name their model where one is served.
NAMELESS = (
    *("ChatCompletionRequest", "ClassifyRequest", "CompletionRequest", "EmbeddingRequest"),
    *("MessagesRequest", "RerankRequest", "ResponseRequest", "ScoreRequest", "PoolingRequest"),
    *("CompactRequest", "CountTokensRequest", "InputTokensRequest"),
)


def _texts_or_ids(most: int) -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    many: Schema = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}


def constrain(components: dict[str, Schema]) -> None:
    """Adds them, and the rules, to the schemas of requests among `components`, in place."""
    for name, field, most in TEXTS_OR_IDS:
        if name in components:
            texts = _texts_or_ids(most.value)
            needed = field in components[name].get("required", ())
            components[name]["properties"][field] = texts if needed else {"anyOf": [*texts["anyOf"], NULL.schema]}
    for name in NAMELESS:
        if name in components:
            shown = components[name]
            shown["required"] = [field for field in shown.get("required", ()) if field != "model"]
            shown["properties"]["model"] = {"anyOf": [shown["properties"]["model"], NULL.schema]}
            shown["additionalProperties"] = NULL.schema  # an unknown field that is null counts as not given
    for name, rules in table():
        if name in components:
            components[name] |= schema_of(rules)
