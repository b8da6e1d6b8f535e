"""GET and DELETE /v1/responses/{id}, POST .../cancel, GET .../input_items, POST /v1/responses/input_tokens."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.routing import Route

from services.gateway.api.backend import Backend, BackendRoute
from services.gateway.api.openai.completions import CompletionsRoute, positions_of, reading, stream
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, ApiRoute, Operation
from services.gateway.core.asgi import read_body, send_json
from services.gateway.core.errors import InvalidParameter, unsupported
from services.gateway.core.pagination import ListPage, Order, PageQuery
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.decoding import read_query
from services.gateway.intake.responses.schemas import (
    INCLUDABLE,
    InputTokensRequest,
    ResponseRequest,
    check_include,
)
from services.gateway.persistence.responses import Found, ResponseLookup
from services.gateway.streams.response_items import Item
from shared.errors import RyzansteinError
from shared.messages.records import StoredResponse
from shared.service.endpoints import Receive, Scope, Send

Include = Annotated[
    list[Annotated[str, Meta(extra_json_schema={"enum": INCLUDABLE})]],
    Meta(description="What to show besides."),
]


class Retrieval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /v1/responses/{id}."""

    include: Include = []
    stream: Annotated[bool, Meta(description="Whether to send its events.")] = False
    starting_after: (
        Annotated[
            int,
            Meta(
                ge=0, le=2**31 - 1, description="With `stream`: the number of the last event that you have."
            ),
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    """Not None: in a URL null is a text."""
    include_obfuscation: Annotated[
        bool, Meta(description="Nothing is ever padded here.", extra_json_schema={"enum": [False]})
    ] = False


class ItemsQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    include: Include = []
    order: Order = "desc"


class ItemList(ListPage):
    """What GET /v1/responses/{id}/input_items answers."""

    data: Sequence[Item]


def retrieval(query: bytes) -> Retrieval:
    """Of GET /v1/responses/{id}. Raises `InvalidParameter`."""
    given = read_query(query, Retrieval)
    check_include(given.include)
    if given.include_obfuscation:
        raise unsupported("include_obfuscation")
    if given.starting_after is not msgspec.UNSET and not given.stream:
        raise InvalidParameter(
            "The 'starting_after' parameter is only allowed when 'stream' is true.",
            param="starting_after",
            reason="invalid_value",
        )
    return given


def item_list(items: Sequence[Item], wanted: ItemsQuery) -> ItemList:
    """A page of `items`. Raises `InvalidParameter` when `after` is none of them."""
    ordered = list(items) if wanted.order == "asc" else list(reversed(items))
    if wanted.after:
        ids = [item["id"] for item in ordered]
        if wanted.after not in ids:
            raise InvalidParameter(
                f"Invalid 'after': no item '{wanted.after[:64]}' is among the input items of this response.",
                param="after",
                reason="invalid_value",
            )
        ordered = ordered[ids.index(wanted.after) + 1 :]
    data = ordered[: wanted.limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return ItemList(object="list", data=data, first_id=first, last_id=last, has_more=len(ordered) > len(data))


PATH = "/v1/responses"
TAG = "Responses"
READING = (504,)
"""Beside what follows from the path: no token came in time."""


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


CREATE = Operation(
    f"POST {PATH}",
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
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
COUNT = Operation(
    f"POST {PATH}/input_tokens",
    "countInputTokens",
    "How many tokens an input has.",
    TAG,
    request=InputTokensRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": "What is the capital of France?"},
    response=InputTokens,
    errors=(404, 504),
)
RETRIEVE = Operation(
    f"GET {PATH}/{{response}}",
    "retrieveResponse",
    "A response, or its events from where you stand.",
    TAG,
    "With `stream` a `Last-Event-ID` says the same as `starting_after`.",
    response=Response,
    events=(ResponseEvent,),
    query=Retrieval,
    errors=READING,
)
DELETE = Operation(
    f"DELETE {PATH}/{{response}}",
    "deleteResponse",
    "Ends a response and forgets it.",
    TAG,
    response=Deleted,
    errors=READING,
)
CANCEL = Operation(
    f"POST {PATH}/{{response}}/cancel",
    "cancelResponse",
    "Ends a response; one that has ended is shown as it is.",
    TAG,
    response=Response,
    errors=READING,
)
ITEMS = Operation(
    f"GET {PATH}/{{response}}/input_items",
    "listInputItems",
    "The items that its request brought, page by page.",
    TAG,
    response=ItemList,
    query=ItemsQuery,
    errors=READING,
)


CANCEL_TIMEOUT = 5.0
"""Seconds to wait until a response that was cancelled has ended; then it is shown as it is."""


class ResponseRoute(BackendRoute):
    """A response by its id: the object, its events, or with DELETE its end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responses = self._backend.parts.responses
        public_id = scope["path_params"]["response"]
        if scope["method"] == "DELETE":
            await responses.delete(await responses.find(public_id, scope["state"]["principal"].tenant))
            await send_json(send, 200, Deleted(public_id, "response", True))
            return
        wanted = retrieval(scope["query_string"])
        found = await responses.find(public_id, scope["state"]["principal"].tenant)
        scope["state"]["model"] = found.record.requests[0].model
        if not wanted.stream:
            await send_json(send, 200, await responses.shown(found))
            return
        after = positions_of(scope) if wanted.starting_after is msgspec.UNSET else [wanted.starting_after]
        run = await responses.read(found, after)
        with reading(run, scope, receive):
            await stream(run, send, scope["state"]["request_id"])


class CancelRoute(BackendRoute):
    """Ends a response, for everybody. One that has ended is shown as it is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responses = self._backend.parts.responses
        public_id = scope["path_params"]["response"]
        found = await responses.find(public_id, scope["state"]["principal"].tenant)
        scope["state"]["model"] = found.record.requests[0].model
        shown = await _cancelled(responses, found)
        await send_json(send, 200, shown)


async def _cancelled(responses: ResponseLookup, found: Found) -> bytes:
    """The object once it has ended: another gateway's end comes through the log."""
    if isinstance(found, StoredResponse):
        return found.response
    run = await responses.read(found, None)
    try:
        responses.cancel(found)
        with contextlib.suppress(RyzansteinError):
            async with asyncio.timeout(CANCEL_TIMEOUT):
                async for _ in run.chunks():
                    pass
    except TimeoutError:
        pass
    finally:
        run.close()
    return run.snapshot()


class InputItemsRoute(BackendRoute):
    """The items that a response's request brought, page by page."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responses = self._backend.parts.responses
        wanted = read_query(scope["query_string"], ItemsQuery)
        check_include(wanted.include)
        found = await responses.find(scope["path_params"]["response"], scope["state"]["principal"].tenant)
        items, _ = await responses.items(found)
        await send_json(send, 200, item_list(items, wanted))


class InputTokensRoute(BackendRoute):
    """How many tokens an input has."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake = self._backend.parts.intake
        body = await read_body(scope, receive, self._settings.body_limit, self._settings.body_timeout)
        tokens = await intake.responses.count(body, scope["state"]["principal"].tenant)
        await send_json(send, 200, InputTokens("response.input_tokens", tokens))


def response_routes(backend: Backend, settings: GatewaySettings) -> list[Route]:
    """All of them."""
    return [
        ApiRoute(CompletionsRoute("responses", backend, settings), CREATE),
        ApiRoute(InputTokensRoute(backend, settings), COUNT),
        ApiRoute(ResponseRoute(backend, settings), RETRIEVE, DELETE),
        ApiRoute(CancelRoute(backend, settings), CANCEL),
        ApiRoute(InputItemsRoute(backend, settings), ITEMS),
    ]
