"""Fine-tuning jobs in NATS: their records, their events, and what they train with. Hosts, schedulers and gateways open
them here alone, so that whoever is first creates the same buckets.

    KV `training_jobs`      <tenant>.<job>                          TrainingJob
    KV `training_events`    <tenant>.<job>.<step>-<attempt>-<kind>  TrainingEvent: said again, it is the same entry
    objects `training`      examples, states, metrics               gone when the job is over

Of the events with metrics, one for every step, the newest `TRAINING_EVENTS` are kept: their keys go round. Of the
others there are few.
"""

from collections.abc import AsyncGenerator

from shared.limits import TRAINING_EVENTS
from shared.messages.training import TrainingEvent, TrainingJob, event_name
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Entry
from shared.nats.objects import Objects
from shared.nats.tenants import TenantBucket, tenant_key

KEEP = 7_776_000.0
"""Seconds for which a job is known after its last change, and an event after it was written: 90 days."""


def training_jobs(bus: Bus) -> TenantBucket[TrainingJob]:
    """The bucket of jobs."""
    return TenantBucket(bus, subjects.TRAINING_BUCKET, TrainingJob, lambda job: job.tenant, ttl=KEEP)


def training_objects(bus: Bus) -> Objects:
    """The store of what jobs train with."""
    return Objects(bus, subjects.TRAINING_STORE)


class TrainingEvents:
    """Opened by `ensure`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, subjects.TRAINING_EVENTS_BUCKET, TrainingEvent, ttl=KEEP, plain=True)
        self.ensure = self._bucket.ensure

    async def add(self, tenant: str, event: TrainingEvent, attempt: int = 0) -> None:
        """Writes an event of a job of that tenant. `attempt`: 0 for what is true once, such as a step."""
        step = event.step if event.metrics is None else event.step % TRAINING_EVENTS.value
        name = event_name(event.job, step, event.kind, attempt).removeprefix(f"{event.job}-")
        await self._bucket.put(f"{tenant_key(tenant, event.job)}.{name}", event)

    async def of(self, tenant: str, job: str) -> AsyncGenerator[Entry[TrainingEvent], None]:
        """Those of a job, in the order of their writing."""
        async for entry in self._bucket.scan(f"{tenant_key(tenant, job)}.*"):
            yield entry

    async def follow(self, tenant: str, job: str) -> AsyncGenerator[Entry[TrainingEvent] | None, None]:
        """As `of`, then None once, then each event as it is written, until nobody reads on. Where the connection was
        lost all are yielded anew: revisions tell what is known."""
        async for update in self._bucket.watch_revisions(f"{tenant_key(tenant, job)}.*"):
            if update is None:
                yield None
            elif update[1] is not None:
                yield Entry(update[0], update[1], update[2])

    async def clear(self, tenant: str, job: str) -> None:
        """Removes all of a job."""
        await self._bucket.purge(f"{tenant_key(tenant, job)}.*")
