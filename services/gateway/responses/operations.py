"""The operations of responses, for their routes and the OpenAPI document."""

from typing import Any, Literal

import msgspec

from services.gateway.openapi import parameters
from services.gateway.openapi.operation import GENERATING, Operation, Parameter
from services.gateway.responses.checks import INCLUDABLE
from services.gateway.responses.queries import MAX_EVENT, MAX_PAGE, ItemList
from services.gateway.responses.schemas import InputTokensRequest, ResponseRequest

PATH = "/v1/responses"
TAG = "Responses"
READING = (404, 429, 503, 504)


class Response(msgspec.Struct):
    """A response; what its request said stands in it too."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(msgspec.Struct):
    """An event of a response's stream; `sequence_number` is its id."""

    type: str
    sequence_number: int


class Deleted(msgspec.Struct, frozen=True):
    """What DELETE answers."""

    id: str
    object: str
    deleted: bool


class InputTokens(msgspec.Struct, frozen=True):
    """What the counting of tokens answers."""

    object: str
    input_tokens: int


def _query(name: str, description: str, schema: dict[str, Any]) -> Parameter:
    return Parameter(name, description, schema, "query")


_ID = Parameter(
    "response",
    "The response's id.",
    {"type": "string", "minLength": 1},
    "path",
    "resp_1f0c9a7767e1c5b09b1d6e0f4c2a8835",
)
_INCLUDE = _query(
    "include",
    "What to show besides.",
    {"type": "array", "items": {"type": "string", "enum": list(INCLUDABLE)}},
)
CREATE = Operation(
    "POST",
    PATH,
    "createResponse",
    "Input items in, a response out.",
    TAG,
    "With `stream: true` its events; with `background: true` the response at once, and its text in time.",
    request=ResponseRequest,
    example={
        "model": "SmolLM2-135M-Instruct",
        "input": "What is the capital of France?",
        "max_output_tokens": 32,
    },
    response=Response,
    events=(ResponseEvent,),
    parameters=parameters.GENERATING,
    errors=GENERATING,
)
COUNT = Operation(
    "POST",
    PATH + "/input_tokens",
    "countInputTokens",
    "How many tokens an input has.",
    TAG,
    request=InputTokensRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": "What is the capital of France?"},
    response=InputTokens,
    errors=(404, 408, 413, 429, 503, 504),
)
RETRIEVE = Operation(
    "GET",
    PATH + "/{response}",
    "retrieveResponse",
    "A response, or its events from where you stand.",
    TAG,
    "With `stream` a `Last-Event-ID` says the same as `starting_after`.",
    response=Response,
    events=(ResponseEvent,),
    parameters=(
        _ID,
        _INCLUDE,
        _query("stream", "Whether to send its events.", {"type": "boolean"}),
        _query(
            "starting_after",
            "With `stream`: the number of the last event that you have.",
            {"type": "integer", "minimum": 0, "maximum": MAX_EVENT},
        ),
        _query("include_obfuscation", "Nothing is ever padded here.", {"enum": [False]}),
    ),
    errors=READING,
)
DELETE = Operation(
    "DELETE",
    PATH + "/{response}",
    "deleteResponse",
    "Ends a response and forgets it.",
    TAG,
    response=Deleted,
    parameters=(_ID,),
    errors=READING,
)
CANCEL = Operation(
    "POST",
    PATH + "/{response}/cancel",
    "cancelResponse",
    "Ends a response; one that has ended is shown as it is.",
    TAG,
    response=Response,
    parameters=(_ID,),
    errors=READING,
)
ITEMS = Operation(
    "GET",
    PATH + "/{response}/input_items",
    "listInputItems",
    "The items that its request brought, page by page.",
    TAG,
    response=ItemList,
    parameters=(
        _ID,
        _INCLUDE,
        _query("limit", "Items of a page.", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
        _query("order", "By time.", {"type": "string", "enum": ["asc", "desc"]}),
        _query("after", "The id of the last item that you have.", {"type": "string"}),
    ),
    errors=READING,
)
