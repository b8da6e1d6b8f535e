"""/v1/batches: POST, GET, GET of one, POST of its cancellation."""

from typing import Any, Literal

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api.backend import Backend, BackendRoute
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import ApiRoute, Operation
from services.gateway.batches.service import BatchCreate
from services.gateway.batches.states import batch_object
from services.gateway.core.asgi import header, read_body, send_json
from services.gateway.core.pagination import ListPage, PageQuery, shown
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.decoding import decode, read_query
from services.gateway.intake.headers import check_idempotency_key
from shared.messages.batches import BatchJob, BatchStatus, Counts
from shared.service.endpoints import Receive, Scope, Send

PATH = "/v1/batches"
TAG = "Batches"


class BatchObject(msgspec.Struct):
    """OpenAI's batch object; it has the times of its states, too."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    request_counts: Counts
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchList(ListPage):
    """A page of batches."""

    data: list[BatchObject]


CREATE = Operation(
    f"POST {PATH}",
    "createBatch",
    "Runs the requests of a file, in idle capacity.",
    TAG,
    request=BatchCreate,
    example={
        "input_file_id": "file-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    response=BatchObject,
    parameters=(operation.IDEMPOTENCY,),
    errors=(404, 422),
)
LIST = Operation(
    f"GET {PATH}",
    "listBatches",
    "The batches that there are, the newest first.",
    TAG,
    response=BatchList,
    query=PageQuery,
    errors=(404,),
)
RETRIEVE = Operation(
    f"GET {PATH}/{{batch}}", "retrieveBatch", "A batch as it stands.", TAG, response=BatchObject
)
CANCEL = Operation(
    f"POST {PATH}/{{batch}}/cancel",
    "cancelBatch",
    "Begins no more of a batch's lines, and keeps what is done.",
    TAG,
    response=BatchObject,
    errors=(409,),
)


BODY_BYTES = 64 << 10


class BatchesRoute:
    """POST and GET of /v1/batches."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings
        self._decoder = msgspec.json.Decoder(BatchCreate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batches, principal = self._backend.parts.batches, scope["state"]["principal"]
        if scope["method"] == "POST":
            key = check_idempotency_key(header(scope, b"idempotency-key"))
            body = await read_body(scope, receive, BODY_BYTES, self._settings.body_timeout)
            job = await batches.submit(decode(body, self._decoder), principal, key)
            await _send(send, job)
            return
        wanted = read_query(scope["query_string"], PageQuery)
        jobs, more = await batches.listed(principal.tenant, wanted.after, wanted.limit)
        data = shown([batch_object(job) for job in jobs], more)
        await send_json(send, 200, msgspec.json.encode(data))


class BatchRoute(BackendRoute):
    """GET of /v1/batches/{id}, POST of /v1/batches/{id}/cancel."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        batches, tenant = self._backend.parts.batches, scope["state"]["principal"].tenant
        batch = scope["path_params"]["batch"]
        act = batches.cancel if scope["method"] == "POST" else batches.get
        await _send(send, await act(batch, tenant))


async def _send(send: Send, job: BatchJob) -> None:
    await send_json(send, 200, msgspec.json.encode(batch_object(job)))


def batch_routes(backend: Backend, settings: GatewaySettings) -> list[BaseRoute]:
    """For the application's router."""
    one = BatchRoute(backend, settings)
    return [
        ApiRoute(BatchesRoute(backend, settings), CREATE, LIST),
        ApiRoute(one, RETRIEVE),
        ApiRoute(one, CANCEL),
    ]
