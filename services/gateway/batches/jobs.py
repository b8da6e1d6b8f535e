"""Batches in the bucket `batches`, and the lease under which one gateway runs one.

    owner ""  ──compare-and-set──▶ owner A, beat 1, 2, 3, ... every RENEW seconds
                                       │ the record stands still for LEASE seconds, by the clock of whoever watches
                                       ▼
                                   owner B, beat n + 1; A hears of it with its next writing

No clocks are compared, and nobody must be right about A's death: what A still does is harmless (see
`runner.py`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import structlog

from services.gateway.core.errors import QuotaExceeded
from shared.errors import Unavailable
from shared.limits import KNOWN_BATCHES, TENANT_BATCHES
from shared.messages.batches import OVER, BatchJob
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Entry
from shared.nats.tenants import Held, Holdings, Marks, TenantBucket, tenant_key

log = structlog.get_logger(__name__)

RENEW = 2.0
LEASE = 8.0
KEEP = 2_592_000.0
"""Seconds for which a batch is known after the last change: 30 days, as OpenAI keeps its files."""
MOST_KNOWN = KNOWN_BATCHES.value
FORGOTTEN_AT_ONCE = 500
KNOWN_WITHIN = 5.0
"""Seconds that a submission waits for a gateway that has just started to know what batches there are."""

Change = Callable[[BatchJob], BatchJob]


class LeaseLost(Exception):
    """Another gateway runs the batch now."""


class Jobs:
    """Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, most: int) -> None:
        """`most`: batches of a tenant that are not over."""
        self.bucket = TenantBucket(bus, subjects.BATCHES_BUCKET, BatchJob, lambda job: job.tenant, ttl=KEEP)
        self._most = most
        self._held = Holdings()
        """Each counts 1 byte while it is not over."""
        self._known = asyncio.Event()
        self._marks = Marks[BatchJob]()

    async def admit(self, tenant: str) -> None:
        """Whether the tenant may have one more. Raises `QuotaExceeded`, `Unavailable`."""
        try:
            await asyncio.wait_for(self._known.wait(), KNOWN_WITHIN)
        except TimeoutError:
            raise Unavailable(
                "The gateway does not know yet what batches there are; try again in a moment.", retry_after=1
            ) from None
        known, unfinished = self._held.of(tenant)
        if unfinished >= self._most:
            raise QuotaExceeded(
                f"You have {unfinished:,} batches that are not over ({TENANT_BATCHES.cited(self._most)}); wait until "
                "one has ended, or cancel one."
            )
        if known >= MOST_KNOWN:
            await self._forget_oldest(tenant, known - MOST_KNOWN + FORGOTTEN_AT_ONCE)

    async def _forget_oldest(self, tenant: str, count: int) -> None:
        entries = [entry async for entry in self.bucket.of(tenant) if entry.value.clean]
        entries.sort(key=lambda entry: entry.value.created_at)
        for entry in entries[:count]:
            await self.bucket.delete(entry.key, entry.revision)
            self._held.forget(entry.key)
        log.info("oldest_batches_deleted", tenant=tenant, batches=len(entries[:count]))

    async def create(self, job: BatchJob) -> bool:
        """False when there is a batch of that id."""
        if await self.bucket.create(job.tenant, job.id, job) is None:
            return False
        self._held.note(tenant_key(job.tenant, job.id), _held(job))
        return True

    async def get(self, batch: str, tenant: str) -> BatchJob | None:
        entry = await self.bucket.get(tenant, batch) if batch else None
        return None if entry is None else entry.value

    async def forget(self, job: BatchJob) -> None:
        """One that is over, for good."""
        key = tenant_key(job.tenant, job.id)
        await self.bucket.delete(key)
        self._held.forget(key)

    async def of(self, tenant: str) -> list[BatchJob]:
        """Those of a tenant, in no order."""
        return [entry.value async for entry in self.bucket.of(tenant)]

    async def change(self, batch: str, tenant: str, change: Change) -> BatchJob | None:
        """Applies `change` to whatever the batch is now; None when there is none."""
        while True:
            entry = await self.bucket.get(tenant, batch)
            if entry is None:
                return None
            changed = change(entry.value)
            if changed == entry.value:
                return changed
            if await self.bucket.update(entry.key, changed, entry.revision) is not None:
                return changed

    async def watch(self) -> AsyncIterator[tuple[str, BatchJob | None, int]]:
        """Every batch there is and will be, by its key, with its revision."""
        async with contextlib.aclosing(self.bucket.watch_revisions()) as updates:
            async for update in updates:
                if update is None:
                    self._known.set()
                    continue
                key, job, revision = update
                if job is None:
                    self._held.forget(key)
                    self._marks.note(key, revision, time.monotonic())
                else:
                    self._held.note(key, _held(job))
                yield update

    async def sweep(self) -> None:
        """Removes the marks of forgotten batches."""
        await self._marks.sweep(self.bucket, time.monotonic())

    async def claim(self, key: str, job: BatchJob, revision: int, owner: str) -> "Lease | None":
        """The batch for `owner`, if nobody has changed it since `revision`."""
        mine = msgspec.structs.replace(job, owner=owner, beat=job.beat + 1)
        taken = await self.bucket.update(key, mine, revision)
        return None if taken is None else Lease(self.bucket, Entry(key, mine, taken), owner)


def _held(job: BatchJob) -> Held:
    return Held(job.tenant, int(job.status not in OVER), 0.0)


class Lease:
    """The right to run a batch, until another gateway has taken it."""

    def __init__(self, bucket: TenantBucket[BatchJob], entry: Entry[BatchJob], owner: str) -> None:
        self.bucket = bucket
        self._entry = entry
        self._owner = owner
        self._writing = asyncio.Lock()

    @property
    def job(self) -> BatchJob:
        """The batch as this gateway knows it."""
        return self._entry.value

    async def write(self, change: Change) -> BatchJob:
        """Applies `change` to what the batch is now, others' changes included.

        Raises `LeaseLost`, `BrokerUnavailable`.
        """
        async with self._writing:
            while True:
                changed = change(self.job)
                changed = msgspec.structs.replace(changed, beat=changed.beat + 1)
                revision = await self.bucket.update(self._entry.key, changed, self._entry.revision)
                if revision is not None:
                    self._entry = Entry(self._entry.key, changed, revision)
                    return changed
                await self._read()

    async def _read(self) -> None:
        entry = await self.bucket.get(self.job.tenant, self.job.id)
        if entry is None or entry.value.owner != self._owner:
            raise LeaseLost
        self._entry = entry

    async def release(self) -> None:
        """Whoever comes first may take the batch. Raises `LeaseLost`, `BrokerUnavailable`."""
        await self.write(lambda job: msgspec.structs.replace(job, owner=""))
