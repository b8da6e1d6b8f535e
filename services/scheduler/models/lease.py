"""The right to decide, which one scheduler has at a time: an entry in the bucket `leases`.

    nobody ──create──▶ holder A, beat 1, 2, 3, ... every quarter of its length
                            │ the entry stands still for the lease's length, by the clock of whoever watches
                            ▼
                       holder B, beat n + 1, by compare-and-set; A hears of it with its next writing

No clocks are compared. Who could not write for three quarters of the length takes itself for dead, before another takes
over; and if two decided at once it would do no harm: commands may be repeated, and hosts have the last word.
"""

import asyncio
from dataclasses import dataclass

import structlog

from shared.errors import RyzansteinError
from shared.messages import ModelLease
from shared.nats.kv import Bucket, KvEntry

KEY = "models"
RENEWALS = 4  # times that it is renewed within its length

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LeaseWatch:
    """Whether another's lease has run out. Pure: times are the watcher's monotonic seconds."""

    length: float
    _revision: int = 0
    _since: float = 0.0

    def expired(self, revision: int, now: float) -> bool:
        """Takes in that the entry has this revision now."""
        if revision != self._revision:
            self._revision, self._since = revision, now
        return now - self._since >= self.length

    def forget(self) -> None:
        """Nothing is known of what has happened meanwhile: its time begins anew."""
        self._revision = 0


class SchedulerLease:
    """One scheduler's part in it."""

    def __init__(self, bucket: Bucket[ModelLease], holder: str, length: float) -> None:
        """`length` in seconds."""
        self._bucket = bucket
        self._holder = holder
        self._length = length
        self._watch = LeaseWatch(length)
        self._held: KvEntry[ModelLease] | None = None
        self._until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this scheduler decides now."""
        return self._held is not None and asyncio.get_running_loop().time() < self._until

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return self._length / RENEWALS

    async def look(self) -> None:
        """Takes, renews or watches the lease; called every `pause` seconds. Raises nothing: what the broker does
        not do now it may do the next time."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._length):
                entry = await self._advance(began)
        except (RyzansteinError, TimeoutError) as error:
            log.debug("lease_renewal_failed", error=str(error))
            self._watch.forget()
            return
        if entry is not None and self._held is None:
            log.info("lease_taken", beat=entry.value.beat)
        elif entry is None and self._held is not None:
            log.warning("lease_lost")
        self._held = entry
        if entry is not None:
            self._until = began + self._length * (RENEWALS - 1) / RENEWALS

    async def _advance(self, now: float) -> KvEntry[ModelLease] | None:
        """The entry as it is now, if it is ours."""
        entry = await self._bucket.get(KEY)
        if entry is None:
            first = ModelLease(self._holder)
            created = await self._bucket.create(KEY, first)
            return None if created is None else KvEntry(KEY, first, created)
        if entry.value.holder != self._holder and not self._watch.expired(entry.revision, now):
            return None
        mine = ModelLease(self._holder, entry.value.beat + 1)
        written = await self._bucket.update(KEY, mine, entry.revision)
        return None if written is None else KvEntry(KEY, mine, written)

    async def release(self) -> None:
        """Whoever comes next may decide at once."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            await self._bucket.delete(KEY, held.revision)
        except RyzansteinError as error:
            log.debug("lease_release_failed", error=str(error))
