"""A job's record as the host that trains it sees it: every change is a compare-and-set, and whoever finds that the job
is another's stops.

    KV training_jobs ──▶ host, attempt: mine? ──▶ change ──▶ written
                              └── no ──▶ NotMine
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from services.executor.supervisor.trainings.job_changes import is_mine
from shared.errors import BrokerUnavailable
from shared.messages.training import TrainingJob
from shared.nats.kv import Contention, KvEntry
from shared.nats.tenants import TenantBucket

T = TypeVar("T")

RETRY = 0.5  # seconds before the broker is asked again

log = structlog.get_logger(__name__)


class NotMine(Exception):
    """The job is other hosts', or nobody's any more, or gone."""


class LocalJobRecord:
    def __init__(self, bucket: TenantBucket[TrainingJob], host: str, tenant: str, job: str, attempt: int) -> None:
        self._bucket = bucket
        self._host = host
        self._tenant = tenant
        self._id = job
        self._attempt = attempt
        self._entry: KvEntry[TrainingJob] | None = None

    @property
    def job(self) -> TrainingJob:
        """As it was read or written last."""
        assert self._entry is not None, "it has been read"
        return self._entry.value

    async def read(self) -> TrainingJob:
        """As it is now. Raises `NotMine`, `BrokerUnavailable`."""
        entry = await self._bucket.get(self._tenant, self._id)
        if entry is None or not is_mine(entry.value, self._host, self._attempt):
            raise NotMine
        self._entry = entry
        return entry.value

    async def write(self, change: Callable[[TrainingJob], TrainingJob]) -> TrainingJob:
        """Makes what `change` makes of it; called again where somebody else was first. Raises `NotMine`,
        `BrokerUnavailable`."""
        if self._entry is None:
            await self.read()
        contention = Contention(f"the fine-tuning job {self._id}")
        while True:
            assert self._entry is not None, "it has been read"
            changed = change(self._entry.value)
            if changed == self._entry.value:
                return changed
            revision = await self._bucket.update(self._entry.key, changed, self._entry.revision)
            if revision is not None:
                self._entry = KvEntry(self._entry.key, changed, revision)
                return changed
            contention.lost()
            await self.read()


async def patiently(what: Callable[[], Awaitable[T]]) -> T:
    """As `what`, again and again while the broker is away: training goes on meanwhile."""
    while True:
        try:
            return await what()
        except BrokerUnavailable as error:
            log.debug("broker_awaited", error=str(error))
        await asyncio.sleep(RETRY)
