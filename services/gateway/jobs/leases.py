"""Jobs that outlive their gateway, and the lease under which one gateway looks after one.

    owner ""  ──compare-and-set──▶ owner A, beat 1, 2, 3, ... every RENEW seconds
                                       │ the beat stands still for LEASE seconds, by the clock of whoever watches
                                       ▼
                                   owner B, beat n + 1; A hears of it with its next writing

No clocks are compared, and nobody must be right about A's death: what A still does is harmless (see
`batches/runner.py`).
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import structlog

from services.gateway.core.errors import KeyReused, QuotaExceeded
from shared.errors import BrokerUnavailable, Unavailable
from shared.limits import Limit
from shared.messages.jobs import JobRecord
from shared.nats.kv import Contention, KvEntry
from shared.nats.tenants import DeletionMarkers, Held, Holdings, TenantBucket, tenant_key
from shared.tasks import cancel_all

log = structlog.get_logger(__name__)

RENEW = 2.0
LEASE = 8.0
FORGOTTEN_AT_ONCE = 500
# Seconds that a submission waits for a gateway that has just started to know what jobs there are.
KNOWN_WITHIN = 5.0

JobT = TypeVar("JobT", bound=JobRecord)


class LeaseLost(Exception):
    """Another gateway looks after the job now."""


@dataclass(frozen=True)
class JobTraits(Generic[JobT]):
    """What one kind of jobs is called, and how many there may be."""

    word: str  # in logs, as a field and the beginning of events
    plural: str  # in errors
    is_over: Callable[[JobT], bool]
    most: Limit  # of a tenant's that are not over
    known: Limit  # of a tenant's; the oldest that are over are forgotten


class Jobs(Generic[JobT]):
    """Methods raise `BrokerUnavailable`."""

    def __init__(
        self,
        traits: JobTraits[JobT],
        bucket: TenantBucket[JobT],
        most: int,
        forgetting: Callable[[JobT], Awaitable[None]] | None = None,
    ) -> None:
        """`most`: as `traits.most` is set; `forgetting`: what goes before the record of one that is forgotten."""
        self.traits = traits
        self.bucket: TenantBucket[JobT] = bucket
        self._most = most
        self._forgetting: Callable[[JobT], Awaitable[None]] | None = forgetting
        self._held = Holdings()  # each counts 1 byte while it is not over
        self._known = asyncio.Event()
        self._marks: DeletionMarkers[JobT] = DeletionMarkers()

    async def admit(self, tenant: str) -> None:
        """Whether the tenant may have one more. Raises `QuotaExceeded`, `Unavailable`."""
        await self.wait()
        known, unfinished = self._held.of(tenant)
        if unfinished >= self._most:
            raise QuotaExceeded(
                f"You have {unfinished:,} {self.traits.plural} that are not over "
                f"({self.traits.most.cited(self._most)}); wait until one has ended, or cancel one."
            )
        if known >= self.traits.known.value:
            await self._forget_oldest(tenant, known - self.traits.known.value + FORGOTTEN_AT_ONCE)

    async def wait(self) -> None:
        """Until it is known what jobs there are. Raises `Unavailable`."""
        try:
            await asyncio.wait_for(self._known.wait(), KNOWN_WITHIN)
        except TimeoutError:
            raise Unavailable(
                f"The gateway has not read the list of {self.traits.plural} yet; try again in a moment.", retry_after=1
            ) from None

    async def _forget_oldest(self, tenant: str, count: int) -> None:
        entries = [entry async for entry in self.bucket.of(tenant) if entry.value.clean]
        entries.sort(key=lambda entry: entry.value.created_at)
        for entry in entries[:count]:
            if self._forgetting is not None:
                await self._forgetting(entry.value)
            await self.bucket.delete(entry.key, entry.revision)
            self._held.forget(entry.key)
        plural = self.traits.plural.replace("-", "_").replace(" ", "_")
        log.info(f"oldest_{plural}_deleted", tenant=tenant, **{plural: len(entries[:count])})

    async def create(self, job: JobT) -> bool:
        """False when there is a job of that id."""
        if await self.bucket.create(job.tenant, job.id, job) is None:
            return False
        self._held.note(tenant_key(job.tenant, job.id), self._holds(job))
        return True

    async def get(self, job: str, tenant: str) -> JobT | None:
        entry = await self.bucket.get(tenant, job) if job else None
        return None if entry is None else entry.value

    async def find_by_key(self, job: str, tenant: str, print_: str) -> JobT | None:
        """The job that there is under an idempotency key, by the id that `job_id` made of it. Raises `KeyReused` where
        `print_` is not its request's."""
        found = await self.get(job, tenant)
        if found is not None and found.fingerprint != print_:
            raise KeyReused(
                "This Idempotency-Key was used with another request body; use a new key for another request.",
                param="Idempotency-Key",
            )
        return found

    async def forget(self, job: JobT) -> None:
        """One that is over, for good."""
        key = tenant_key(job.tenant, job.id)
        await self.bucket.delete(key)
        self._held.forget(key)

    async def of(self, tenant: str) -> list[JobT]:
        """Those of a tenant, in no order."""
        return [entry.value async for entry in self.bucket.of(tenant)]

    async def change(self, job: str, tenant: str, change: Callable[[JobT], JobT]) -> JobT | None:
        """Applies `change` to whatever the job is now; None when there is none."""

        def made(known: JobT) -> JobT:
            changed = change(known)
            return known if changed == known else changed

        return await self.bucket.change(tenant, job, made, f"the {self.traits.word} {job}")

    async def follow(self, *told: Callable[[str, JobT | None, int], object]) -> None:
        """Tells each of every job there is and will be, by its key, with its revision. Runs until it is cancelled."""

        def note(key: str, job: JobT | None, revision: int) -> None:
            if job is None:
                self._held.forget(key)
                self._marks.note(key, revision, time.monotonic())
            else:
                self._held.note(key, self._holds(job))
            for one in told:
                one(key, job, revision)

        await self.bucket.follow_revisions(note, self._known.set)

    async def sweep(self) -> None:
        """Removes the marks of forgotten jobs."""
        await self._marks.sweep(self.bucket, time.monotonic())

    async def claim(self, key: str, job: JobT, revision: int, owner: str) -> "JobLease[JobT] | None":
        """The job for `owner`, if nobody has changed it since `revision`."""
        mine = msgspec.structs.replace(job, owner=owner, beat=job.beat + 1)
        taken = await self.bucket.update(key, mine, revision)
        return None if taken is None else JobLease(self, KvEntry(key, mine, taken), owner)

    def _holds(self, job: JobT) -> Held:
        return Held(job.tenant, int(not self.traits.is_over(job)), 0.0)


def job_id(prefix: str, tenant: str, key: str) -> str:
    """A new id; under an idempotency key always the same."""
    if not key:
        return prefix + secrets.token_hex(16)
    text = f"{len(tenant)}:{tenant}:{key}"
    return prefix + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint(wanted: msgspec.Struct) -> str:
    """Of a request: the same for one that asks for the same."""
    return hashlib.blake2b(msgspec.json.encode(wanted, order="deterministic"), digest_size=16).hexdigest()


class JobLease(Generic[JobT]):
    """The right to look after a job, until another gateway has taken it."""

    def __init__(self, jobs: Jobs[JobT], entry: KvEntry[JobT], owner: str) -> None:
        self.bucket: TenantBucket[JobT] = jobs.bucket
        self._word = jobs.traits.word
        self._entry: KvEntry[JobT] = entry
        self.owner = owner
        self._writing = asyncio.Lock()
        self._lost = False  # whether the renewal has found that it is

    @property
    def job(self) -> JobT:
        """The job as this gateway knows it."""
        return self._entry.value

    async def write(self, change: Callable[[JobT], JobT]) -> JobT:
        """Applies `change` to what the job is now, others' changes included.

        Raises `LeaseLost`, `BrokerUnavailable`.
        """
        contention = Contention(f"the {self._word} {self.job.id}")
        async with self._writing:
            while True:
                changed = change(self.job)
                changed = msgspec.structs.replace(changed, beat=changed.beat + 1)
                revision = await self.bucket.update(self._entry.key, changed, self._entry.revision)
                if revision is not None:
                    self._entry = KvEntry(self._entry.key, changed, revision)
                    return changed
                contention.lost()
                await self._read()

    async def _read(self) -> None:
        entry = await self.bucket.get(self.job.tenant, self.job.id)
        if entry is None or entry.value.owner != self.owner:
            raise LeaseLost
        self._entry = entry

    async def release(self) -> None:
        """Whoever comes first may take the job. Raises `LeaseLost`, `BrokerUnavailable`."""
        await self.write(lambda job: msgspec.structs.replace(job, owner=""))

    @contextlib.asynccontextmanager
    async def renewed(
        self, change: Callable[[JobT], JobT] = lambda job: job, told: Callable[[JobT], None] = lambda job: None
    ) -> AsyncIterator[None]:
        """Says, while the block runs, that the job is looked after. `change`: what is written beside it; `told`: gets
        the job each time. A lost lease ends the block: it raises `LeaseLost`."""
        holder = asyncio.current_task()
        assert holder is not None, "it runs in a task"
        renewal = asyncio.create_task(self._renew(holder, change, told))
        try:
            yield
        except asyncio.CancelledError:
            if self._lost:
                raise LeaseLost from None
            raise
        finally:
            await cancel_all([renewal])

    async def _renew(
        self, holder: "asyncio.Task[None]", change: Callable[[JobT], JobT], told: Callable[[JobT], None]
    ) -> None:
        while True:
            await asyncio.sleep(RENEW)
            try:
                job = await self.write(change)
            except BrokerUnavailable as error:
                log.info(f"{self._word}_lease_renewal_failed", error=str(error), **{self._word: self.job.id})
                continue
            except LeaseLost:
                self._lost = True
                break
            told(job)
        while True:
            holder.cancel()  # once is not enough where `wait_for` swallows it: see `cancel_all`
            await asyncio.sleep(RENEW)
