"""The request fields that say what an answer's text must match: OpenAI's, and vLLM's newer and older ones."""

from typing import Any

import msgspec


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format.json_schema`."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Without effect: a schema is always held to the letter, or refused."""


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: str | dict[str, Any] | None = None
    """A JSON Schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's notation, or GBNF."""
    json_object: bool | None = None


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names of the same."""
