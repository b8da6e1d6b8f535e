"""The headers and parts of paths that several operations have."""

from typing import Any

from services.gateway.openapi.operation import Parameter
from services.gateway.requests.validation import IDEMPOTENCY_KEY, REQUEST_ID

MAX_SECONDS = "x-max-seconds"
"""Stands in a schema for the gateway's own limit, which the document fills in."""


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$"}


REQUEST = Parameter(
    "x-request-id",
    "A name for the request, in the log of every service that it passes; made up where it is missing.",
    _pattern(REQUEST_ID.pattern),
    example="order-66-attempt-1",
)
SESSION = Parameter(
    "X-Session-ID",
    "The conversation goes back to the group that holds its KV cache. 1 to 256 printable ASCII characters.",
    _pattern(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?"),
    example="conversation-7",
)
IDEMPOTENCY = Parameter(
    "Idempotency-Key",
    "The same request under the same key is one generation: a repeat attaches to it or returns its answer. With it "
    "`Last-Event-ID` may be sent: the stream goes on behind that event.",
    _pattern(IDEMPOTENCY_KEY.pattern),
    example="order-66",
)
BACKGROUND = Parameter(
    "X-Ryzanstein-Background",
    "Seconds for which the generation goes on while nobody listens.",
    {"type": "number", "exclusiveMinimum": 0, MAX_SECONDS: True},
    example=60,
)
LAST_EVENT = Parameter(
    "Last-Event-ID",
    "The id of the last event that you have: the stream goes on behind it.",
    {"type": "string", "pattern": r"^([0-9]{1,10}(,[0-9]{1,10})*)?$", "maxLength": 2048},
    example="12",
)
GENERATING = (SESSION, IDEMPOTENCY, BACKGROUND)
"""The headers of a request for tokens."""
MODEL = Parameter(
    "model",
    "The model's name; slashes in it may stay as they are.",
    {"type": "string", "minLength": 1},
    "path",
)
MODEL_ASKED = Parameter(
    "model",
    "The model's name; it may be left out where one model alone is served.",
    {"type": "string", "minLength": 1},
    "query",
)
GENERATION = Parameter(
    "generation",
    "The id that every chunk and every response of it has.",
    {"type": "string", "minLength": 1},
    "path",
    "chatcmpl-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
)
