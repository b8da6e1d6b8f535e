"""What routes that generate have in common, whosever API they are: from a request to the stream or the whole answer."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api.backend import GatewayBackend, RouteMaker
from services.gateway.api.dialect import PLAIN, Dialect
from services.gateway.api.openapi.operation import ApiRoute, Operation
from services.gateway.auth.authenticator import Principal
from services.gateway.core.asgi import (
    EventStream,
    LineStream,
    StreamChunk,
    UntilGone,
    connection_of,
    disconnected,
    forget_headers,
    header,
    read_body,
    request_headers,
    send_json,
)
from services.gateway.core.errors import ClientGone, InvalidParameter
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.headers import check_background, check_flag, check_idempotency_key, check_session_id
from services.gateway.intake.record import Context
from services.gateway.streams import cursor
from services.gateway.streams.embeddings import octets_of
from services.gateway.streams.progress import tell_progress
from services.gateway.streams.stream_reader import LARGE, StreamReader
from shared.service.endpoints import Receive, Scope, Send

DONE = StreamChunk(b"[DONE]")
GENERATION_HEADER = "x-ryzanstein-generation"  # of an answer that names no id: the id of its generation


class CompletionsRoute:
    """A path of one endpoint."""

    def __init__(self, endpoint: str, backend: GatewayBackend) -> None:
        self._endpoint = endpoint
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self._prepared(scope, receive)
        with reading(run, scope, receive):
            await run.begin()
            if run.stream:
                await stream(run, scope, send)
            elif run.answer.record.octets:
                await _send_octets(run, send)
            else:
                await send_json(send, 200, await run.collect())

    async def _prepared(self, scope: Scope, receive: Receive) -> StreamReader:
        """What it is made of is held no longer than that takes."""
        settings = self._backend.settings
        context = context_of(scope, settings, gone=partial(disconnected, receive))
        body = await read_body(scope, receive, settings.body_limit, settings.body_timeout)
        forget_headers(scope)
        return await self._backend.parts.intake.prepare(self._endpoint, body, context)


def completions(endpoint: str, *operations: Operation, direct: bool = False) -> RouteMaker:
    """Makes the paths of one endpoint. `direct`: as of `ApiRoute`."""

    def make(backend: GatewayBackend) -> list[BaseRoute]:
        app = CompletionsRoute(endpoint, backend)
        return [ApiRoute(app, one, direct=app if direct else None) for one in operations]

    return make


async def _send_octets(run: StreamReader, send: Send) -> None:
    """Vectors, and in a header where each lies."""
    whole, record = await run.collect(), run.answer.record
    named = {"id": run.answer.public_id, "created": int(record.created)}
    beside = len(whole) > LARGE
    octets, told = await asyncio.to_thread(octets_of, whole, named) if beside else octets_of(whole, named)
    head = {"metadata": told} if record.octets == "bytes" else {}
    await send_json(send, 200, octets, head, content_type="application/octet-stream")


class _Reading(UntilGone):
    __slots__ = ("_run",)

    def __init__(self, run: StreamReader, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive, run.client_gone)
        self._run = run

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._run.close()


def reading(run: StreamReader, scope: Scope, receive: Receive) -> AbstractContextManager[None]:
    """Around the reading of the run that answers a request: it ends when the client goes."""
    scope["state"]["model"] = run.model
    record = run.answer.record
    if record.octets or record.endpoint in scope["app"].dialects.nameless:
        scope["state"]["answer_headers"][GENERATION_HEADER] = run.answer.public_id
    tell_progress(scope["state"]["answer_headers"], run.answer, time.time())
    return _Reading(run, scope, receive)


_OF_CONTEXT = frozenset(
    (b"idempotency-key", b"last-event-id", b"x-ryzanstein-progress", b"x-session-id", b"x-ryzanstein-background")
)


def context_of(
    scope: Scope, settings: GatewaySettings, *, gone: Callable[[], Awaitable[object]] | None = None
) -> Context:
    """What the headers say; `gone` as in `Context`. Raises `InvalidParameter`."""
    state = scope["state"]
    principal: Principal = state["principal"]
    none_said = _OF_CONTEXT.isdisjoint(request_headers(scope))
    return Context(
        state["request_id"],
        tenant=principal.tenant,
        principal=principal,
        answer_headers=state["answer_headers"],
        gone=gone,
        **({} if none_said else _said(scope, settings)),
    )


def _said(scope: Scope, settings: GatewaySettings) -> dict[str, Any]:
    """The fields of `Context` that headers are about."""
    key = check_idempotency_key(header(scope, b"idempotency-key"))
    after = positions_of(scope)
    if after is not None and not key:
        raise InvalidParameter(
            "Invalid header 'Last-Event-ID': a POST resumes a stream only under the Idempotency-Key that began it; "
            "send that too, or GET /v1/generations/{id}/stream.",
            param="Last-Event-ID",
            reason="invalid_header",
        )
    return {
        "session": check_session_id(header(scope, b"x-session-id")),
        "background": check_background(header(scope, b"x-ryzanstein-background"), settings.background_limit),
        "key": key,
        "after": after,
        "return_progress": check_flag(header(scope, b"x-ryzanstein-progress"), "X-Ryzanstein-Progress"),
    }


def positions_of(scope: Scope) -> list[int] | None:
    """The Last-Event-ID header; an empty one is none. Raises `InvalidParameter`."""
    given = header(scope, b"last-event-id")
    return cursor.parse(given) if given else None


def wants_positions(scope: Scope) -> bool:
    """Whether lines are to say where in the log they stand, as the ids of events do. Raises `InvalidParameter`."""
    return check_flag(header(scope, b"x-ryzanstein-positions"), "X-Ryzanstein-Positions")


async def stream(run: StreamReader, scope: Scope, send: Send, *, positions: bool = False) -> None:
    """Events until the end, or lines, with `positions` if that is wanted. An error is raised: before the first chunk,
    so that it gets a status of its own; behind it, once the client has been told, so that it is logged and counted as
    what it is and not as a success."""
    dialect: Dialect = scope["app"].dialects.by_endpoint.get(run.answer.record.endpoint, PLAIN)
    lines = dialect.stream is LineStream
    connection = connection_of(scope)
    events = LineStream(send, connection, positions=positions) if lines else EventStream(send, connection)
    try:
        async with contextlib.aclosing(run.chunks(events.write_now if connection else None)) as chunks:
            async for batch in chunks:
                await events.write(batch)
        await events.write([DONE] if run.ends_with_done and dialect.done else [], end=True)
    except ClientGone:
        raise
    except Exception as error:
        if events.started:
            told = msgspec.json.encode(run.error_event(dialect.describe(error, scope["state"]["request_id"])))
            await events.write([StreamChunk(told, event=dialect.error_event)], end=True)
        raise
