"""GET and DELETE /v1/responses/{id}, POST .../cancel, GET .../input_items, POST /v1/responses/input_tokens."""

import asyncio
import contextlib

from starlette.routing import Route

from services.gateway.backend import Backend
from services.gateway.http_io import read_body, send_json, watch_disconnect
from services.gateway.openapi.operation import ApiRoute
from services.gateway.responses import operations
from services.gateway.responses.lookup import Found, ResponseLookup
from services.gateway.responses.operations import Deleted, InputTokens
from services.gateway.responses.queries import item_list, page, retrieval
from services.gateway.rest import CompletionsRoute, positions_of, stream
from services.gateway.settings import GatewaySettings
from shared.errors import RyzansteinError
from shared.service.endpoints import Receive, Scope, Send

CANCEL_TIMEOUT = 5.0
"""Seconds to wait until a response that was cancelled has ended; then it is shown as it is."""


class ResponseRoute:
    """A response by its id: the object, its events, or with DELETE its end."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responses = self._backend.responses
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
        await self._stream(scope, receive, send, found, after)

    async def _stream(
        self, scope: Scope, receive: Receive, send: Send, found: Found, after: list[int] | None
    ) -> None:
        run = await self._backend.responses.read(found, after)
        watcher = asyncio.create_task(watch_disconnect(receive, run.mailbox))
        try:
            await stream(run, send, scope["state"]["request_id"])
        finally:
            watcher.cancel()
            run.close()


class CancelRoute:
    """Ends a response, for everybody. One that has ended is shown as it is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responses = self._backend.responses
        public_id = scope["path_params"]["response"]
        found = await responses.find(public_id, scope["state"]["principal"].tenant)
        scope["state"]["model"] = found.record.requests[0].model
        shown = await _cancelled(responses, found)
        await send_json(send, 200, shown)


async def _cancelled(responses: ResponseLookup, found: Found) -> bytes:
    """The object once it has ended: another gateway's end comes through the log."""
    if found.stored is not None:
        return found.stored.response
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


class InputItemsRoute:
    """The items that a response's request brought, page by page."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responses = self._backend.responses
        wanted = page(scope["query_string"])
        found = await responses.find(scope["path_params"]["response"], scope["state"]["principal"].tenant)
        items, _ = await responses.items(found)
        await send_json(send, 200, item_list(items, wanted))


class InputTokensRoute:
    """How many tokens an input has."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake = self._backend.intake
        body = await read_body(scope, receive, self._settings.body_limit, self._settings.body_timeout)
        assert intake.responses is not None, "it is set before the first request"
        tokens = await intake.responses.count(body, scope["state"]["principal"].tenant)
        await send_json(send, 200, InputTokens("response.input_tokens", tokens))


def response_routes(backend: Backend, settings: GatewaySettings) -> list[Route]:
    """All of them."""
    return [
        ApiRoute(CompletionsRoute("responses", backend, settings), operations.CREATE),
        ApiRoute(InputTokensRoute(backend, settings), operations.COUNT),
        ApiRoute(ResponseRoute(backend), operations.RETRIEVE, operations.DELETE),
        ApiRoute(CancelRoute(backend), operations.CANCEL),
        ApiRoute(InputItemsRoute(backend), operations.ITEMS),
    ]
