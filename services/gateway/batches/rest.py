"""/v1/batches: POST, GET, GET of one, POST of its cancellation."""

import msgspec
from starlette.routing import BaseRoute

from services.gateway.backend import Backend
from services.gateway.batches import operations
from services.gateway.batches.service import BatchCreate
from services.gateway.batches.states import batch_object
from services.gateway.files.listing import limit_of, query, shown
from services.gateway.http_io import header, read_body, send_json
from services.gateway.openapi.operation import ApiRoute
from services.gateway.requests import validation
from services.gateway.settings import GatewaySettings
from shared.messages.batches import BatchJob
from shared.service.endpoints import Receive, Scope, Send

USUAL = 20
BODY_BYTES = 64 << 10


class BatchesRoute:
    """POST and GET of /v1/batches."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings
        self._decoder = msgspec.json.Decoder(BatchCreate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batches, principal = self._backend.batches, scope["state"]["principal"]
        if scope["method"] == "POST":
            key = validation.check_idempotency_key(header(scope, b"idempotency-key"))
            body = await read_body(scope, receive, BODY_BYTES, self._settings.body_timeout)
            job = await batches.submit(validation.decode(body, self._decoder), principal, key)
            await _send(send, job)
            return
        params = query(scope["query_string"], ("after", "limit"))
        jobs, more = await batches.listed(
            principal.tenant, params.get("after"), limit_of(params, USUAL, operations.MOST)
        )
        data = shown([batch_object(job) for job in jobs], more)
        await send_json(send, 200, msgspec.json.encode(data))


class BatchRoute:
    """GET of /v1/batches/{id}, POST of /v1/batches/{id}/cancel."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batches, tenant = self._backend.batches, scope["state"]["principal"].tenant
        batch = scope["path_params"]["batch"]
        act = batches.cancel if scope["method"] == "POST" else batches.get
        await _send(send, await act(batch, tenant))


async def _send(send: Send, job: BatchJob) -> None:
    await send_json(send, 200, msgspec.json.encode(batch_object(job)))


def batch_routes(backend: Backend, settings: GatewaySettings) -> list[BaseRoute]:
    """For the application's router."""
    one = BatchRoute(backend, settings)
    return [
        ApiRoute(BatchesRoute(backend, settings), operations.CREATE, operations.LIST),
        ApiRoute(one, operations.RETRIEVE),
        ApiRoute(one, operations.CANCEL),
    ]
