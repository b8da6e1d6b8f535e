"""Batches as clients and other programs see them: submitted, looked at, listed, cancelled."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.auth.authenticator import Principal
from services.gateway.batches import states
from services.gateway.batches.settings import BatchJobSettings
from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.core.pagination import page
from services.gateway.files.files import BATCH_EXPIRY, Files
from services.gateway.intake.schemas import Metadata
from services.gateway.jobs.leases import Jobs, JobTraits, fingerprint, job_id
from shared import tracing
from shared.errors import InvalidRequest
from shared.limits import KNOWN_BATCHES, TENANT_BATCHES
from shared.messages.batches import OVER, BatchJob, Counts, ExpiresAfter
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.tenants import TenantBucket

# What the lines of a batch may ask for.
LineUrl = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
]


# Seconds for which a batch is known after the last change: 30 days, as OpenAI keeps its files.
KEEP = 2_592_000.0
TRAITS = JobTraits[BatchJob](
    "batch", "batches", lambda job: job.status in OVER, most=TENANT_BATCHES, known=KNOWN_BATCHES
)


def batch_jobs(bus: Bus, most: int) -> Jobs[BatchJob]:
    """`most`: batches of a tenant that are not over."""
    bucket = TenantBucket(bus, subjects.BATCHES_BUCKET, BatchJob, lambda job: job.tenant, ttl=KEEP)
    return Jobs(TRAITS, bucket, most)


class BatchCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: LineUrl
    completion_window: Annotated[str, Meta(extra_json_schema={"pattern": f"^(?=0*[1-9]){states.WINDOW}$"})]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def unknown_batch(batch: str) -> RouteError:
    """The error for an id of which there is no batch, or another tenant's."""
    return RouteError(f"No batch found with id '{batch[:64]}'.")


class Batches:
    """The same for HTTP and the queue. Methods raise `InvalidRequest`, `BrokerUnavailable`."""

    def __init__(self, jobs: Jobs[BatchJob], files: Files, settings: BatchJobSettings) -> None:
        self._jobs = jobs
        self._files = files
        self.settings = settings

    def check(self, wanted: BatchCreate) -> float:
        """The seconds of its window. Raises `InvalidParameter` for what is wrong, its file aside."""
        return states.window_seconds(wanted.completion_window, self.settings.batch_window_limit)

    async def submit_lines(
        self,
        wanted: Callable[[str], BatchCreate],
        lines: bytes,
        principal: Principal,
        key: str = "",
        print_: str = "",
        *,
        requests: int = 0,
    ) -> BatchJob:
        """As `submit`, with `lines` as a file of their own, which is gone again where no batch came of it. `wanted`:
        what is submitted of a file with that id."""
        async with self._files.receive(principal.tenant, "input.jsonl", _parts(lines), len(lines)) as record:
            expires = record.created_at + BATCH_EXPIRY
            file = await self._files.publish(msgspec.structs.replace(record, purpose="batch", expires_at=expires))
        used = ""
        try:
            job = await self.submit(wanted(file.id), principal, key, print_, requests=requests, own_input=True)
            used = job.input_file_id
        except InvalidRequest:
            await self._files.delete(file.id, principal.tenant)
            raise
        if used != file.id:  # the same request, under the same key, was faster
            with contextlib.suppress(InvalidRequest):
                await self._files.delete(file.id, principal.tenant)
        return job

    async def submit(
        self,
        wanted: BatchCreate,
        principal: Principal,
        key: str = "",
        print_: str = "",
        *,
        requests: int = 0,
        own_input: bool = False,
    ) -> BatchJob:
        """A new batch; under an idempotency key the one that there is. `print_`: the fingerprint of a request that
        came in another form than JSON. `requests`: how many it has, where that is known; its input says it later.
        `own_input`: its file goes with it."""
        seconds = self.check(wanted)
        kept = wanted.output_expires_after
        expires = float(kept.seconds) if kept else 0.0
        file = await self._files.get(wanted.input_file_id, principal.tenant)
        if file.purpose != "batch":
            raise InvalidParameter(
                f"The file '{file.id}' has the purpose '{file.purpose}'; upload it with the purpose 'batch'.",
                param="input_file_id",
            )
        print_ = (print_ or fingerprint(wanted)) if key else ""
        if key and (known := await self.find_by_key(principal, key, print_)) is not None:
            return known
        await self._jobs.admit(principal.tenant)
        now = time.time()
        job = BatchJob(
            id=job_id("batch_", principal.tenant, key),
            tenant=principal.tenant,
            endpoint=wanted.endpoint,
            input_file_id=file.id,
            input_object=file.object_name,
            completion_window=wanted.completion_window,
            created_at=now,
            expires_at=now + seconds,
            metadata=wanted.metadata,
            output_expires_after=expires,
            fingerprint=print_,
            key=principal.key,
            traceparent=tracing.edge().traceparent,
            counts=Counts(total=requests),
            own_input=own_input,
        )
        if await self._jobs.create(job):
            return job
        known = await self.find_by_key(principal, key, job.fingerprint)
        if known is None:
            raise unknown_batch(job.id)
        return known

    async def find_by_key(self, principal: Principal, key: str, print_: str) -> BatchJob | None:
        """The batch that there is under an idempotency key. Raises `KeyReused` where `print_` is not its request's."""
        return await self._jobs.find_by_key(job_id("batch_", principal.tenant, key), principal.tenant, print_)

    async def get(self, batch: str, tenant: str) -> BatchJob:
        job = await self._jobs.get(batch, tenant)
        if job is None:
            raise unknown_batch(batch)
        return job

    async def cancel(self, batch: str, tenant: str) -> BatchJob:
        """Begins no more of its lines, and keeps what is done."""
        await self.get(batch, tenant)
        job = await self._jobs.change(batch, tenant, lambda known: states.cancelling(known, time.time()))
        if job is None:
            raise unknown_batch(batch)
        return job

    async def delete(self, batch: str, tenant: str) -> None:
        """Forgets a batch that is over, with its results, and its input where nobody has uploaded that for itself.
        Raises `RouteError` for one that is not."""
        job = await self.get(batch, tenant)
        if states.needs_work(job):
            raise RouteError(
                f"Cannot delete a batch with status '{job.status}'; cancel it, and wait until it has ended.",
                status=409,
                reason="batch_is_not_over",
            )
        own = job.input_file_id if job.own_input else ""
        for file in filter(None, (job.output_file_id, job.error_file_id, own)):
            with contextlib.suppress(RouteError):  # it is gone already
                await self._files.delete(file, tenant)
        await self._jobs.forget(job)

    async def listed(self, tenant: str, after: str | None, limit: int) -> tuple[list[BatchJob], bool]:
        """The newest first; and whether there are more."""
        return page(await self._jobs.of(tenant), after=after, limit=limit)

    async def all_of(self, tenant: str, endpoint: LineUrl) -> list[BatchJob]:
        """Those whose lines ask for `endpoint`, the newest first."""
        jobs = [job for job in await self._jobs.of(tenant) if job.endpoint == endpoint]
        return sorted(jobs, key=lambda job: (job.created_at, job.id), reverse=True)


async def _parts(data: bytes) -> AsyncIterator[bytes]:
    yield data
