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
from collections.abc import AsyncIterator, Callable

import msgspec

from shared import subjects
from shared.batches import BatchJob
from shared.bus import Bus
from shared.stores import Bucket, Entry

RENEW = 2.0
LEASE = 8.0
KEEP = 2_592_000.0
"""Seconds for which a batch is known after the last change: 30 days, as OpenAI keeps its files."""

Change = Callable[[BatchJob], BatchJob]


class LeaseLost(Exception):
    """Another gateway runs the batch now."""


class Jobs:
    """Opened by `start`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._opened: Bucket[BatchJob] | None = None

    async def start(self) -> None:
        self._opened = await Bucket.open(self._bus, subjects.BATCHES_BUCKET, BatchJob, ttl=KEEP)

    @property
    def _bucket(self) -> Bucket[BatchJob]:
        assert self._opened is not None, "not started"
        return self._opened

    async def create(self, job: BatchJob) -> bool:
        """False when there is a batch of that id."""
        return await self._bucket.create(job.id, job) is not None

    async def get(self, batch: str) -> BatchJob | None:
        entry = await self._bucket.get(batch) if batch else None
        return None if entry is None else entry.value

    async def of(self, tenant: str) -> list[BatchJob]:
        """Those of a tenant, in no order."""
        return [job for job in (await self._bucket.items()).values() if job.tenant == tenant]

    async def change(self, batch: str, change: Change) -> BatchJob | None:
        """Applies `change` to whatever the batch is now; None when there is none."""
        while True:
            entry = await self._bucket.get(batch)
            if entry is None:
                return None
            changed = change(entry.value)
            if changed == entry.value:
                return changed
            if await self._bucket.update(batch, changed, entry.revision) is not None:
                return changed

    async def watch(self) -> AsyncIterator[tuple[str, BatchJob | None, int]]:
        """Every batch there is and will be, with its revision."""
        async with contextlib.aclosing(self._bucket.watch_revisions()) as updates:
            async for update in updates:
                if update is not None:
                    yield update

    async def claim(self, job: BatchJob, revision: int, owner: str) -> "Lease | None":
        """The batch for `owner`, if nobody has changed it since `revision`."""
        mine = msgspec.structs.replace(job, owner=owner, beat=job.beat + 1)
        taken = await self._bucket.update(job.id, mine, revision)
        return None if taken is None else Lease(self._bucket, Entry(job.id, mine, taken), owner)


class Lease:
    """The right to run a batch, until another gateway has taken it."""

    def __init__(self, bucket: Bucket[BatchJob], entry: Entry[BatchJob], owner: str) -> None:
        self._bucket = bucket
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
                revision = await self._bucket.update(changed.id, changed, self._entry.revision)
                if revision is not None:
                    self._entry = Entry(changed.id, changed, revision)
                    return changed
                await self._read()

    async def _read(self) -> None:
        entry = await self._bucket.get(self._entry.key)
        if entry is None or entry.value.owner != self._owner:
            raise LeaseLost
        self._entry = entry

    async def release(self) -> None:
        """Whoever comes first may take the batch. Raises `LeaseLost`, `BrokerUnavailable`."""
        await self.write(lambda job: msgspec.structs.replace(job, owner=""))
