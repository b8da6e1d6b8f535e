"""/v1/messages/batches, over the batches that there are: POST, GET, cancellation, results, DELETE."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openapi import operation
from services.gateway.batches.dependencies import LineEndpoint
from services.gateway.batches.lines import Checker
from services.gateway.batches.service import BatchCreate, Batches
from services.gateway.batches.states import needs_work
from services.gateway.core.asgi import header, send_parts
from services.gateway.core.errors import InvalidField, RouteError
from services.gateway.core.pagination import NeighbourQuery, neighbours
from services.gateway.dialects.anthropic.errors import MESSAGES
from services.gateway.dialects.anthropic.messages import EXAMPLE, message_operation
from services.gateway.dialects.anthropic.results import (
    batch_object,
    custom_id_of,
    digest_of,
    job_id,
    line_of,
    missing_result,
    public_id,
    result_of,
)
from services.gateway.dialects.anthropic.schemas import MessagesRequest
from services.gateway.files.lines import AT_ONCE, FileLine, LineSplitter
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import check_idempotency_key
from services.gateway.lifecycle.idempotency import fingerprint
from shared import limits
from shared.errors import UnknownModel
from shared.messages.batches import BatchJob

PATH = f"{MESSAGES}/batches"
JSON_LINES = "application/x-jsonl"
DAY = 86_400  # seconds of a message batch, as at Anthropic's, where the settings allow as many
# Before an idempotency key: no key of a client has a space, so that the two APIs' are apart.
_KEYS_OF = "messages "


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, limits.CUSTOM_ID.length(min_length=1)]
    params: MessagesRequest


class MessageBatchCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchRequest], Meta(min_length=1)]


class _RawRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    params: msgspec.Raw


class _RawCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `MessageBatchCreate`: each request is read by itself."""

    requests: Annotated[list[_RawRequest], Meta(min_length=1)]


class MessageBatch(msgspec.Struct):
    """Anthropic's batch."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: dict[str, int]
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(msgspec.Struct):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct, frozen=True):
    id: str
    type: str


class _Listed(msgspec.Struct, frozen=True):
    """A batch by the id that clients know."""

    id: str
    job: BatchJob


CREATE = message_operation(
    f"POST {PATH}",
    "createMessageBatch",
    "Runs many requests for messages, in idle capacity.",
    "All of them name the same model, and are checked before the batch is taken. Larger batches go to /v1/batches, "
    "with lines for /v1/messages.",
    request=MessageBatchCreate,
    example={"requests": [{"custom_id": "first", "params": EXAMPLE}]},
    response=MessageBatch,
    parameters=(operation.IDEMPOTENCY,),
    errors=(404, 422, 507),
)
LIST = message_operation(
    f"GET {PATH}",
    "listMessageBatches",
    "Lists message batches, the newest first.",
    response=MessageBatchList,
    query=NeighbourQuery,
    errors=(404,),
)
RETRIEVE = message_operation(
    f"GET {PATH}/{{message_batch}}", "retrieveMessageBatch", "Shows a message batch.", response=MessageBatch
)
DELETE = message_operation(
    f"DELETE {PATH}/{{message_batch}}",
    "deleteMessageBatch",
    "Deletes a message batch that has ended, and its results.",
    response=MessageBatchDeleted,
    errors=(409,),
)
CANCEL = message_operation(
    f"POST {PATH}/{{message_batch}}/cancel",
    "cancelMessageBatch",
    "Cancels a message batch; finished requests keep their results.",
    response=MessageBatch,
    errors=(409,),
)
RESULTS = message_operation(
    f"GET {PATH}/{{message_batch}}/results",
    "messageBatchResults",
    "The result of each request of a message batch, a line each, in no order.",
    response_content={JSON_LINES: {"type": "string"}},
)

_decoder = msgspec.json.Decoder(_RawCreate)


async def create(ask: RequestContext) -> dict[str, Any]:
    key = check_idempotency_key(header(ask.scope, b"idempotency-key"))
    body = await ask.body(ask.settings.body_limit)
    given = decode(body, _decoder)
    batches, key, print_ = (ask.parts.job(Batches), _KEYS_OF + key if key else "", fingerprint(body) if key else "")
    if key and (known := await batches.find_by_key(ask.principal, key, print_)) is not None:
        return batch_object(known)
    await ask.counted()
    lines = await _checked(ask, given, batches.settings.batch_requests)
    window = f"{max(1, min(DAY, int(batches.settings.batch_window_limit)))}s"

    def batch_create(file: str) -> BatchCreate:
        return BatchCreate(input_file_id=file, endpoint="/v1/messages", completion_window=window)

    job = await batches.submit_lines(batch_create, lines, ask.principal, key, print_, requests=len(given.requests))
    return batch_object(job)


async def _checked(ask: RequestContext, given: _RawCreate, most: int) -> bytes:
    """The requests as lines, `most` at most. Raises `InvalidParameter` or `UnknownModel` for the first that is
    wrong."""
    endpoint = LineEndpoint("messages", ask.parts.intake, ask.parts.catalog)
    checker = Checker(MESSAGES, partial(endpoint.check, tenant=ask.tenant), most)
    lines: list[bytes] = []
    for index, request in enumerate(given.requests):
        line = line_of(request.custom_id, request.params)
        checker.check(FileLine(index + 1, line, ""))
        if checker.errors:
            error = checker.errors[0]
            place = f"requests[{index}].{(error.param or 'params').replace('body', 'params', 1)}"
            if error.code == UnknownModel.code:
                raise UnknownModel(f"Invalid '{place}': {error.message}", param=place)
            raise InvalidField(place, error.message, reason=error.code)
        lines.append(line)
        if len(lines) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return b"\n".join(lines)


async def list_batches(ask: RequestContext) -> dict[str, Any]:
    wanted = ask.query(NeighbourQuery)
    await ask.counted()
    jobs = await ask.parts.job(Batches).all_of(ask.tenant, "/v1/messages")
    found, more = neighbours([_Listed(public_id(job), job) for job in jobs], wanted)
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    data = [batch_object(item.job) for item in found]
    return {"data": data, "has_more": more, "first_id": first, "last_id": last}


async def retrieve(ask: RequestContext) -> dict[str, Any]:
    return batch_object(await _job(ask))


async def cancel(ask: RequestContext) -> dict[str, Any]:
    job = await _job(ask)
    return batch_object(await ask.parts.job(Batches).cancel(job.id, ask.tenant))


async def delete(ask: RequestContext) -> MessageBatchDeleted:
    job = await _job(ask)
    await ask.parts.job(Batches).delete(job.id, ask.tenant)
    return MessageBatchDeleted(public_id(job), "message_batch_deleted")


async def results(ask: RequestContext) -> None:
    """A line for each request, as fast as the client takes them."""
    job = await _job(ask)
    if needs_work(job):
        raise RouteError(
            f"The message batch '{public_id(job)}' has no results yet; ask again once its processing_status is 'ended'."
        )
    await send_parts(ask.send, _results(ask, job), JSON_LINES)


async def _job(ask: RequestContext) -> BatchJob:
    """Raises `RouteError`."""
    named = ask.named("message_batch")
    with contextlib.suppress(RouteError):
        job = await ask.parts.job(Batches).get(job_id(named), ask.tenant)
        if job.endpoint == MESSAGES:
            return job
    raise RouteError(f"No message batch found with id '{named[:64]}'.")


async def _results(ask: RequestContext, job: BatchJob) -> AsyncGenerator[bytes, None]:
    """Those of the output, then of the errors, then of what was never run."""
    told: set[int] = set()
    for file in filter(None, (job.output_file_id, job.error_file_id)):
        async with contextlib.aclosing(_lines(ask, file)) as parts:
            async for lines in parts:
                told.update(digest_of(custom_id_of(line.data)) for line in lines)
                yield b"".join(result_of(line.data) for line in lines)
    if len(told) >= job.counts.total:
        return
    async with contextlib.aclosing(_lines(ask, job.input_file_id)) as parts:
        async for lines in parts:
            names = [custom_id_of(line.data) for line in lines]
            left = [name for name in names if digest_of(name) not in told]
            if left:
                yield b"".join(missing_result(job, name) for name in left)


async def _lines(ask: RequestContext, file: str) -> AsyncGenerator[list[FileLine], None]:
    """The lines of a file, `AT_ONCE` at a time."""
    files = ask.parts.files
    splitter = LineSplitter(files.limit)
    async with contextlib.aclosing(files.content(await files.get(file, ask.tenant))) as parts:
        async for part in parts:
            found = splitter.feed(part)
            for begin in range(0, len(found), AT_ONCE):
                yield found[begin : begin + AT_ONCE]
                await asyncio.sleep(0)
    yield splitter.end()


message_batch_routes = routes_of(
    (CREATE, create), (LIST, list_batches), (RETRIEVE, retrieve), (DELETE, delete), (CANCEL, cancel), (RESULTS, results)
)
