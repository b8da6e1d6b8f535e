"""POST /v1/chat/completions and /v1/completions, GET /v1/models and /v1/models/{id}."""

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
import structlog

from services.gateway.backend import Backend
from services.gateway.build import Context
from services.gateway.errors import describe
from services.gateway.http_io import EventStream, header, read_body, send_json, watch_disconnect
from services.gateway.intake import Endpoint
from services.gateway.mailbox import ClientGone
from services.gateway.run import Run
from services.gateway.settings import GatewaySettings
from services.gateway.validation import check_session_id
from shared.errors import InternalError, RyzansteinError
from shared.messages import ModelCard
from shared.telemetry import Receive, Scope, Send

log = structlog.get_logger(__name__)

DONE = b"[DONE]"


class CompletionsRoute:
    """One of the two endpoints that generate."""

    def __init__(self, endpoint: Endpoint, backend: Backend, settings: GatewaySettings) -> None:
        self._endpoint = endpoint
        self._backend = backend
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._backend.active():
            intake = self._backend.intake
            context = Context(scope["state"]["request_id"], check_session_id(header(scope, b"x-session-id")))
            settings = self._settings
            body = await read_body(scope, receive, settings.body_limit, settings.body_timeout)
            run = await intake.prepare(self._endpoint, body, context)
            scope["state"]["model"] = run.model
            watcher = asyncio.create_task(watch_disconnect(receive, run.mailbox))
            try:
                await run.submit()
                if run.stream:
                    await _stream(run, send, context.request_id)
                else:
                    await send_json(send, 200, await run.collect())
            finally:
                watcher.cancel()
                run.close()


async def _stream(run: Run, send: Send, request_id: str) -> None:
    """Events until the end. An error before the first chunk is raised: it gets a status of its own."""
    events = EventStream(send)
    try:
        async with contextlib.aclosing(run.chunks()) as chunks:
            async for batch in chunks:
                await events.write([chunk.data for chunk in batch], position=batch[-1].position)
        await events.write([DONE], end=True)
    except ClientGone:
        raise
    except Exception as error:
        if not events.started:
            raise
        log_failure(error)
        await events.write([msgspec.json.encode(describe(error, request_id))], end=True)


def log_failure(error: Exception) -> None:
    """A fault of ours with its stack trace, anything else as a line."""
    if isinstance(error, RyzansteinError):
        fault = isinstance(error, InternalError)
        log.log(
            logging.ERROR if fault else logging.INFO, "generation_failed", code=error.code, error=str(error)
        )
    else:
        log.exception("request_failed", exc_info=error)


class Model(msgspec.Struct, frozen=True):
    """OpenAI's model object; `max_model_len` as vLLM has it."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int

    @classmethod
    def of(cls, card: ModelCard) -> "Model":
        return cls(card.model, "model", card.created, "ryzanstein", card.context_length)


class ModelsRoute:
    """The models that are served."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        models = [Model.of(card) for card in self._backend.catalog.listed()]
        data: dict[str, Any] = {"object": "list", "data": models}
        await send_json(send, 200, msgspec.json.encode(data))


class ModelRoute:
    """One model, also while it waits for a group. Names may have slashes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        card = self._backend.catalog.card(scope["path_params"]["model"])
        await send_json(send, 200, Model.of(card))
