"""GET and DELETE /v1/generations/{id}, GET /v1/generations/{id}/stream: a generation by its id."""

import asyncio

import msgspec

from services.gateway.api.backend import Backend
from services.gateway.api.openai.completions import positions_of, stream
from services.gateway.core.asgi import send_json, watch_disconnect
from shared.service.endpoints import Receive, Scope, Send


class Cancelled(msgspec.Struct, frozen=True):
    """What DELETE answers."""

    id: str
    object: str
    cancelled: bool
    """False when it had ended before."""


class GenerationRoute:
    """What has come of it so far; or, with DELETE, its end."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        public_id, tenant = scope["path_params"]["generation"], scope["state"]["principal"].tenant
        if scope["method"] == "DELETE":
            await send_json(send, 200, await self._cancel(public_id, tenant))
            return
        state = await self._backend.reading.state(public_id, scope["state"]["request_id"], tenant)
        scope["state"]["model"] = state.model
        await send_json(send, 200, state)

    async def _cancel(self, public_id: str, tenant: str) -> Cancelled:
        answer, going = await self._backend.reading.cancel(public_id, tenant)
        return Cancelled(answer.public_id, "generation", going)


class GenerationStreamRoute:
    """Its events behind `Last-Event-ID`, in the format of the endpoint that began it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        public_id, tenant = scope["path_params"]["generation"], scope["state"]["principal"].tenant
        run = await self._backend.reading.attach(public_id, positions_of(scope), tenant=tenant)
        scope["state"]["model"] = run.model
        watcher = asyncio.create_task(watch_disconnect(receive, run.mailbox.close))
        try:
            await stream(run, send, scope["state"]["request_id"])
        finally:
            watcher.cancel()
            run.close()
