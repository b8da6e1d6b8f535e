"""GET and DELETE /v1/responses/{id}, POST .../cancel, GET .../input_items, POST /v1/responses/input_tokens."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
from starlette.routing import Route

from services.gateway.api.backend import Backend, BackendRoute
from services.gateway.api.openai.completions import CompletionsRoute, positions_of, reading, stream
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, ApiRoute, Operation, Parameter
from services.gateway.core.asgi import read_body, send_json
from services.gateway.core.errors import InvalidParameter, check_range, unsupported
from services.gateway.core.settings import GatewaySettings
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

PAGE = 20
"""Items of a page where no limit is given, as OpenAI has it."""
MAX_PAGE = 100
MAX_EVENT = 2**31 - 1
_BOOLEANS = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}


class Retrieval(msgspec.Struct, frozen=True):
    stream: bool = False
    starting_after: int | None = None


class Page(msgspec.Struct, frozen=True):
    limit: int = PAGE
    order: str = "desc"
    after: str = ""


class ItemList(msgspec.Struct, frozen=True):
    """What GET /v1/responses/{id}/input_items answers."""

    object: str
    data: Sequence[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def retrieval(query: bytes) -> Retrieval:
    """Of GET /v1/responses/{id}. Raises `InvalidParameter`."""
    given = _read(query, ("include", "stream", "starting_after", "include_obfuscation"))
    check_include(given.get("include"))
    if _boolean(given, "include_obfuscation"):
        raise unsupported("include_obfuscation")
    stream = _boolean(given, "stream")
    after = _integer(given, "starting_after", 0, MAX_EVENT)
    if after is not None and not stream:
        raise InvalidParameter(
            "The 'starting_after' parameter is only allowed when 'stream' is true.",
            param="starting_after",
            reason="invalid_value",
        )
    return Retrieval(stream, after)


def page(query: bytes) -> Page:
    """Of GET /v1/responses/{id}/input_items. Raises `InvalidParameter`."""
    given = _read(query, ("include", "limit", "order", "after"))
    check_include(given.get("include"))
    order = given.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidParameter(
            f"Invalid value: '{order[:64]}'. Supported values are: 'asc', 'desc'.",
            param="order",
            reason="invalid_value",
        )
    limit = _integer(given, "limit", 1, MAX_PAGE)
    return Page(PAGE if limit is None else limit, order, given.get("after", [""])[-1])


def item_list(items: Sequence[Item], wanted: Page) -> ItemList:
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
    return ItemList("list", data, first, last, len(ordered) > len(data))


def _read(query: bytes, known: Sequence[str]) -> dict[str, list[str]]:
    """Values by name; `include[]` and `include` are the same."""
    found: dict[str, list[str]] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        plain = name.removesuffix("[]")
        if plain not in known:
            raise InvalidParameter(
                f"Unknown parameter: '{name[:64]}'.", param=name[:64], reason="unknown_parameter"
            )
        found.setdefault(plain, []).append(value)
    return found


def _boolean(given: dict[str, list[str]], name: str) -> bool:
    value = given.get(name, ["false"])[-1]
    if value not in _BOOLEANS:
        raise InvalidParameter(
            f"Invalid type for '{name}': expected a boolean.", param=name, reason="invalid_type"
        )
    return _BOOLEANS[value]


def _integer(given: dict[str, list[str]], name: str, low: int, high: int) -> int | None:
    if name not in given:
        return None
    value = given[name][-1]
    if not value.removeprefix("-").isascii() or not value.removeprefix("-").isdigit() or len(value) > 18:
        raise InvalidParameter(
            f"Invalid type for '{name}': expected an integer.", param=name, reason="invalid_type"
        )
    check_range(name, int(value), low, high)
    return int(value)


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
    parameters=operation.GENERATING_HEADERS,
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
        after = [wanted.starting_after] if wanted.starting_after is not None else positions_of(scope)
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
        wanted = page(scope["query_string"])
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
