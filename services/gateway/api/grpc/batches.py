"""SubmitBatch, GetBatch, CancelBatch, ListBatches: the batches of /v1/batches, as protobuf messages."""

from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.grpc import requests
from services.gateway.api.grpc.call import GrpcCall
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.inference import Answer, unary
from services.gateway.auth.authenticator import Principal
from services.gateway.batches.service import BatchCreate, Batches
from services.gateway.core.errors import InvalidField, RouteError, check_range, convert, missing
from services.gateway.core.pagination import MOST, USUAL
from services.gateway.intake.headers import check_idempotency_key
from shared.messages.batches import BatchJob

# Before an idempotency key: no key of the REST API has a space, so that the two APIs' are apart.
_KEYS_OF = "grpc "
_WINDOW = "24h"


def batch_calls(backend: GatewayBackend) -> dict[str, Answer]:
    """The methods by name."""
    made = _BatchMethods(backend)
    return {
        "SubmitBatch": unary(backend, pb.SubmitBatchRequest, made.submit),
        "GetBatch": unary(backend, pb.GetBatchRequest, made.get),
        "CancelBatch": unary(backend, pb.CancelBatchRequest, made.cancel),
        "ListBatches": unary(backend, pb.ListBatchesRequest, made.listed),
    }


class _BatchMethods:
    def __init__(self, backend: GatewayBackend) -> None:
        self._backend = backend

    async def submit(self, call: GrpcCall, given: pb.SubmitBatchRequest) -> pb.SubmitBatchResponse:
        key = check_idempotency_key(call.metadata("idempotency-key"))
        job = await self._submitted(given, call.principal, _KEYS_OF + key if key else "")
        return pb.SubmitBatchResponse(batch=to_message(job))

    async def get(self, call: GrpcCall, given: pb.GetBatchRequest) -> pb.GetBatchResponse:
        job = await self._backend.parts.job(Batches).get(_named(given.batch_id), call.principal.tenant)
        return pb.GetBatchResponse(batch=to_message(job))

    async def cancel(self, call: GrpcCall, given: pb.CancelBatchRequest) -> pb.CancelBatchResponse:
        job = await self._backend.parts.job(Batches).cancel(_named(given.batch_id), call.principal.tenant)
        return pb.CancelBatchResponse(batch=to_message(job))

    async def listed(self, call: GrpcCall, given: pb.ListBatchesRequest) -> pb.ListBatchesResponse:
        size = given.page_size or USUAL
        check_range("page_size", size, 1, MOST)
        await self._backend.parts.intake.count(call.principal, {})
        try:
            jobs, more = await self._backend.parts.job(Batches).listed(
                call.principal.tenant, given.page_token or None, size
            )
        except RouteError:
            raise InvalidField(
                "page_token",
                "it is not the next_page_token of a page of your batches; leave it out for the first page.",
            ) from None
        shown = [to_message(job) for job in jobs]
        return pb.ListBatchesResponse(batches=shown, next_page_token=jobs[-1].id if more else "")

    async def _submitted(self, given: pb.SubmitBatchRequest, principal: Principal, key: str) -> BatchJob:
        kind = given.WhichOneof("input")
        if kind is None:
            raise missing("input", "input_file_id or jsonl")
        print_ = requests.fingerprint(given) if key else ""
        batches = self._backend.parts.job(Batches)
        if key and (known := await batches.find_by_key(principal, key, print_)) is not None:
            return known
        if kind == "input_file_id":
            return await batches.submit(_wanted(given, given.input_file_id), principal, key, print_)
        batches.check(_wanted(given, ""))
        return await self._submitted_lines(given, principal, key, print_)

    async def _submitted_lines(
        self, given: pb.SubmitBatchRequest, principal: Principal, key: str, print_: str
    ) -> BatchJob:
        """With the lines as a file of their own, which is gone again where no batch came of it."""
        await self._backend.parts.intake.count(principal, {})
        batches, lines = self._backend.parts.job(Batches), given.jsonl
        return await batches.submit_lines(lambda file: _wanted(given, file), lines, principal, key, print_)


def _named(batch: str) -> str:
    if not batch:
        raise missing("batch_id", "the id of a batch")
    return batch


def _wanted(given: pb.SubmitBatchRequest, file: str) -> BatchCreate:
    expires = given.HasField("output_expires_after_seconds")
    wanted = {
        "input_file_id": file,
        "endpoint": given.endpoint,
        "completion_window": given.completion_window or _WINDOW,
        "metadata": dict(given.metadata) or None,
        "output_expires_after": {"seconds": given.output_expires_after_seconds} if expires else None,
    }
    return convert(wanted, BatchCreate)


def to_message(job: BatchJob) -> pb.Batch:
    """A batch for the client."""
    ended = job.completed_at or job.failed_at or job.expired_at or job.cancelled_at
    usage = pb.Usage(prompt_tokens=job.usage.input, completion_tokens=job.usage.output, cached_tokens=job.usage.cached)
    return pb.Batch(
        id=job.id,
        status=f"BATCH_STATUS_{job.status.upper()}",
        endpoint=job.endpoint,
        input_file_id=job.input_file_id,
        output_file_id=job.output_file_id,
        error_file_id=job.error_file_id,
        total=job.counts.total,
        completed=job.counts.completed,
        failed=job.counts.failed,
        create_time=_time(job.created_at),
        expire_time=_time(job.expires_at),
        end_time=_time(ended) if ended else None,
        errors=[
            pb.BatchError(line=one.line or 0, code=one.code, message=one.message, param=one.param or "")
            for one in job.errors
        ],
        metadata=job.metadata or {},
        model=job.model,
        usage=usage if ended else None,
    )


def _time(seconds: float) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(int(seconds * 1e9))
    return made
