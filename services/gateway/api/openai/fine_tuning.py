"""/v1/fine_tuning/jobs: POST, GET; of one: GET, POST of its cancellation, pause and resumption, GET of its events, its
checkpoints, and the files of its adapter."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.api.backend import Handler, RequestContext, routes_of
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import OCTETS, Operation
from services.gateway.core.asgi import EventStream, StreamChunk, disconnected, header, send_parts
from services.gateway.core.errors import InvalidField, InvalidParameter, RouteError, describe
from services.gateway.core.pagination import ListPage, PageQuery, list_object
from services.gateway.intake.headers import check_idempotency_key
from services.gateway.training.objects import checkpoint_object, job_object
from services.gateway.training.requests import FineTuningCreate
from services.gateway.training.service import FineTuning
from shared.messages.training import TrainingJob, TrainingStatus

PATH = "/v1/fine_tuning/jobs"
ONE = PATH + "/{job}"
PERMISSIONS = "/v1/fine_tuning/checkpoints/{checkpoint}/permissions"
_operation = partial(Operation, tag="Fine-tuning")
POSITION = 18  # digits of an event's position at most


class JobError(msgspec.Struct):
    code: str
    message: str
    param: str | None


class FineTuningJob(msgspec.Struct):
    """OpenAI's fine-tuning job, with its progress."""

    object: Literal["fine_tuning.job"]
    id: str
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str  # its tenant
    status: TrainingStatus
    error: JobError | None
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    seed: int
    user_provided_suffix: str | None
    metadata: dict[str, str] | None
    integrations: list[Any]
    lora: dict[str, Any]
    settings: dict[str, Any]
    # Steps done and in all, examples, tokens, the metrics of the last step; null until its files are checked.
    progress: dict[str, Any] | None
    wanted: Literal["run", "pause", "cancel"]  # what its host still has to do
    waiting_for: str | None  # why it does not go on, in a sentence
    started_at: int | None


class FineTuningJobs(ListPage):
    """A page of jobs."""

    data: list[FineTuningJob]


class FineTuningEvent(msgspec.Struct):
    """OpenAI's event of a fine-tuning job."""

    object: Literal["fine_tuning.job.event"]
    id: str
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class FineTuningEvents(ListPage):
    """A page of events."""

    data: list[FineTuningEvent]


class FineTuningCheckpoint(msgspec.Struct):
    """OpenAI's checkpoint of a fine-tuning job."""

    object: Literal["fine_tuning.job.checkpoint"]
    id: str
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]


class FineTuningCheckpoints(ListPage):
    """A page of checkpoints."""

    data: list[FineTuningCheckpoint]


class JobsQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    metadata: dict[str, str] = {}


class EventsQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    stream: Annotated[
        Literal["true", "false"],
        Meta(description="Whether they come as server-sent events, the oldest first, until the job is over."),
    ] = "false"


class CheckpointsQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100, description="Entries of a page.")] = 10


class AdapterQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    checkpoint: Annotated[int | None, Meta(description="The step of a checkpoint; default: the job's result.")] = None


CREATE = _operation(
    f"POST {PATH}",
    "createFineTuningJob",
    "Trains a LoRA adapter on examples, in idle capacity.",
    "The files have the purpose `fine-tune`. When the job has succeeded its model, `ft:...`, is served on every "
    "replica of its base, for its tenant alone.",
    request=FineTuningCreate,
    example={
        "model": "SmolLM2-135M-Instruct",
        "training_file": "file-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
        "suffix": "support",
    },
    response=FineTuningJob,
    parameters=(operation.IDEMPOTENCY,),
    errors=(404, 422),
)
LIST = _operation(
    f"GET {PATH}",
    "listFineTuningJobs",
    "The fine-tuning jobs, the newest first.",
    "`metadata[key]=value`, as often as you like, leaves those that have these metadata; `metadata=null` those that "
    "have none.",
    response=FineTuningJobs,
    query=JobsQuery,
    errors=(404,),
)
RETRIEVE = _operation(f"GET {ONE}", "retrieveFineTuningJob", "Shows a fine-tuning job.", response=FineTuningJob)
CANCEL = _operation(
    f"POST {ONE}/cancel",
    "cancelFineTuningJob",
    "Cancels a fine-tuning job; its checkpoints stay.",
    response=FineTuningJob,
    errors=(409,),
)
PAUSE = _operation(
    f"POST {ONE}/pause",
    "pauseFineTuningJob",
    "Pauses a fine-tuning job; its finished steps are kept.",
    response=FineTuningJob,
    errors=(409,),
)
RESUME = _operation(
    f"POST {ONE}/resume",
    "resumeFineTuningJob",
    "Resumes a paused fine-tuning job.",
    response=FineTuningJob,
    errors=(409,),
)
EVENTS = _operation(
    f"GET {ONE}/events",
    "listFineTuningEvents",
    "Lists the events of a fine-tuning job, the newest first.",
    "With `stream=true` the events come as they happen, the oldest first; `Last-Event-ID` resumes the stream.",
    response=FineTuningEvents,
    query=EventsQuery,
    events=(FineTuningEvent,),
    parameters=(operation.LAST_EVENT,),
)
CHECKPOINTS = _operation(
    f"GET {ONE}/checkpoints",
    "listFineTuningJobCheckpoints",
    "Lists its checkpoints, at the ends of its last epochs, the newest first; each can be used as any model.",
    response=FineTuningCheckpoints,
    query=CheckpointsQuery,
)
ADAPTER = _operation(
    f"GET {ONE}/adapter/{{file}}",
    "downloadFineTunedAdapter",
    "A file of a job's result, as peft has them: adapter_config.json or adapter_model.safetensors.",
    query=AdapterQuery,
    response_content=OCTETS,
)
REFUSED = tuple(
    _operation(path, name, "Not supported: a checkpoint belongs to its tenant alone.", errors=(404,))
    for path, name in (
        (f"GET {PERMISSIONS}", "listFineTuningCheckpointPermissions"),
        (f"POST {PERMISSIONS}", "createFineTuningCheckpointPermission"),
    )
)


async def create(ask: RequestContext) -> dict[str, Any]:
    key = check_idempotency_key(header(ask.scope, b"idempotency-key"))
    wanted = await ask.decoded(FineTuningCreate)
    await ask.counted()
    return job_object(await ask.parts.job(FineTuning).create(wanted, ask.principal, key))


async def list_jobs(ask: RequestContext) -> dict[str, Any]:
    without = b"metadata=null" in ask.scope["query_string"].split(b"&")
    if without:
        rest = [one for one in ask.scope["query_string"].split(b"&") if one != b"metadata=null"]
        ask.scope["query_string"] = b"&".join(rest)
    wanted = ask.query(JobsQuery)
    if without and wanted.metadata:
        raise InvalidParameter("'metadata' is null and has keys; send one of the two.", param="metadata")
    await ask.counted()
    jobs, more = await ask.parts.job(FineTuning).listed(
        ask.tenant, wanted.after, wanted.limit, None if without else wanted.metadata
    )
    return list_object([job_object(job) for job in jobs], more)


def one_job(method: Callable[[FineTuning, str, str], Awaitable[TrainingJob]]) -> Handler:
    """Answers with the job that `method` looks up, or changes."""

    async def answer(ask: RequestContext) -> dict[str, Any]:
        return job_object(await method(ask.parts.job(FineTuning), ask.named("job"), ask.tenant))

    return answer


async def events(ask: RequestContext) -> dict[str, Any] | None:
    wanted = ask.query(EventsQuery)
    await ask.counted()
    if wanted.stream == "true":
        await _stream(ask)
        return None
    found, more = await ask.parts.job(FineTuning).events(ask.named("job"), ask.tenant, wanted.after, wanted.limit)
    return list_object(found, more)


async def _stream(ask: RequestContext) -> None:
    """Until the job is over, the client goes, its key is good no longer, or the gateway stops."""
    after = _position(header(ask.scope, b"last-event-id"))
    stream, gone = EventStream(ask.send), asyncio.create_task(disconnected(ask.receive))
    following = ask.parts.job(FineTuning).follow(ask.named("job"), ask.tenant, after)
    try:
        async with contextlib.aclosing(following):
            async for event in following:
                if gone.done():
                    return
                ask.backend.check_draining()
                ask.backend.authenticator.check(ask.principal)
                if event is not None:
                    await stream.write([StreamChunk(msgspec.json.encode(event[1]), str(event[0]).encode())])
                elif stream.started:
                    await stream.comment()
                else:
                    await stream.write([])
        await stream.write([], end=True)
    except Exception as error:
        if stream.started:
            await stream.write([StreamChunk(msgspec.json.encode(describe(error, ask.request_id)))], end=True)
        raise
    finally:
        gone.cancel()


def _position(given: str | None) -> int:
    if not given:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= POSITION):
        raise InvalidField("Last-Event-ID", f"'{given[:64]}' is no id of an event of this stream.")
    return int(given)


async def checkpoints(ask: RequestContext) -> dict[str, Any]:
    wanted = ask.query(CheckpointsQuery)
    job, found, more = await ask.parts.job(FineTuning).checkpoints(
        ask.named("job"), ask.tenant, wanted.after, wanted.limit
    )
    return list_object([checkpoint_object(job, one) for one in found], more)


async def adapter(ask: RequestContext) -> None:
    """The bytes, a chunk at a time, as fast as the client takes them."""
    step = ask.query(AdapterQuery).checkpoint
    size, content = await ask.parts.job(FineTuning).adapter_file(ask.named("job"), ask.tenant, ask.named("file"), step)
    await send_parts(ask.send, content, "application/octet-stream", size)


async def refused(ask: RequestContext) -> None:
    raise RouteError(
        "Permissions of checkpoints are not supported here: a checkpoint belongs to its tenant alone, and every key "
        "of the tenant may use it.",
        reason="unsupported_endpoint",
    )


fine_tuning_routes = routes_of(
    (CREATE, create),
    (LIST, list_jobs),
    (RETRIEVE, one_job(FineTuning.get)),
    (CANCEL, one_job(FineTuning.cancel)),
    (PAUSE, one_job(FineTuning.pause)),
    (RESUME, one_job(FineTuning.resume)),
    (EVENTS, events),
    (CHECKPOINTS, checkpoints),
    (ADAPTER, adapter),
    *((one, refused) for one in REFUSED),
)
