"""What the checks of responses enforce beyond types, written into the schemas of their requests."""

from services.gateway.api.openapi.narrowing import (
    NULL,
    REQUEST_ID_FIELD,
    Schema,
    given_needs,
    ignore,
    narrow,
    only,
    refuse,
)
from services.gateway.intake.responses.schemas import NEUTRAL
from services.gateway.intake.responses.validation import INCLUDABLE
from services.gateway.intake.validation import PRIORITIES

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
        _constrain_request(components["ResponseRequest"])


def _constrain_input(schema: Schema) -> None:
    properties = schema["properties"]
    for name, neutral in NEUTRAL.items():
        if name in properties:
            refuse(properties, name, neutral)
    narrow(properties["model"], "string", minLength=1)
    narrow(properties["input"], "array", minItems=1)
    properties["truncation"] = {"enum": list(TRUNCATION), "default": None}
    either = {"input": {"not": NULL}, "previous_response_id": {"type": "string", "minLength": 1}}
    schema["anyOf"] = [{"required": [name], "properties": {name: given}} for name, given in either.items()]


def _constrain_request(schema: Schema) -> None:
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
