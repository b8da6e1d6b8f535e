"""/v1/batches: POST, GET, GET of one, POST of its cancellation."""

from functools import partial
from typing import Any, Literal

import msgspec

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import Operation
from services.gateway.batches.service import BatchCreate, Batches
from services.gateway.batches.states import batch_object
from services.gateway.core.asgi import header
from services.gateway.core.pagination import ListPage, PageQuery, list_object
from services.gateway.intake.headers import check_idempotency_key
from shared.messages.batches import BatchStatus, Counts

PATH = "/v1/batches"
_operation = partial(Operation, tag="Batches")


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


CREATE = _operation(
    f"POST {PATH}",
    "createBatch",
    "Runs the requests of a file, in idle capacity.",
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
LIST = _operation(
    f"GET {PATH}", "listBatches", "Lists batches, the newest first.", response=BatchList, query=PageQuery, errors=(404,)
)
RETRIEVE = _operation(f"GET {PATH}/{{batch}}", "retrieveBatch", "Shows a batch.", response=BatchObject)
CANCEL = _operation(
    f"POST {PATH}/{{batch}}/cancel",
    "cancelBatch",
    "Cancels a batch; finished lines keep their results.",
    response=BatchObject,
    errors=(409,),
)


async def create(ask: RequestContext) -> dict[str, Any]:
    key = check_idempotency_key(header(ask.scope, b"idempotency-key"))
    wanted = await ask.decoded(BatchCreate)
    return batch_object(await ask.parts.job(Batches).submit(wanted, ask.principal, key))


async def list_batches(ask: RequestContext) -> dict[str, Any]:
    wanted = ask.query(PageQuery)
    await ask.counted()
    jobs, more = await ask.parts.job(Batches).listed(ask.tenant, wanted.after, wanted.limit)
    return list_object([batch_object(job) for job in jobs], more)


async def retrieve(ask: RequestContext) -> dict[str, Any]:
    return batch_object(await ask.parts.job(Batches).get(ask.named("batch"), ask.tenant))


async def cancel(ask: RequestContext) -> dict[str, Any]:
    return batch_object(await ask.parts.job(Batches).cancel(ask.named("batch"), ask.tenant))


batch_routes = routes_of((CREATE, create), (LIST, list_batches), (RETRIEVE, retrieve), (CANCEL, cancel))
