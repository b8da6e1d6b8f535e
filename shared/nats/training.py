"""Fine-tuning jobs in NATS: their records, their events, and what they train with. Hosts, schedulers and gateways open
them here alone, so that whoever is first creates the same buckets.

    KV `training_jobs`      <tenant>.<job>                          TrainingJob
    KV `training_events`    <tenant>.<job>.<step>-<attempt>-<kind>  TrainingEvent: said again, it is the same entry
    objects `training`      <job>/...                               gone when the job is over
                            <job>/<attempt>/...                     what an attempt of a host has written

What an attempt has left behind is void once a later one has begun, but for what the job's record names.

Of the events with metrics, one for every step, the newest `TRAINING_EVENTS` are kept: their keys go round. Of the
others there are few.
"""

from collections.abc import AsyncGenerator, Collection

from shared.limits import TRAINING_EVENTS
from shared.messages.training import TrainingEvent, TrainingJob, event_name
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry
from shared.nats.objects import Objects
from shared.nats.tenants import TenantBucket, tenant_key

# Seconds for which a job is known after its last change, and an event after it was written: 90 days.
KEEP = 7_776_000.0


def training_jobs(bus: Bus) -> TenantBucket[TrainingJob]:
    """The bucket of jobs."""
    return TenantBucket(bus, subjects.TRAINING_BUCKET, TrainingJob, lambda job: job.tenant, ttl=KEEP)


def training_objects(bus: Bus) -> Objects:
    """The store of what jobs train with."""
    most = bus.settings.training_max_bytes
    return Objects(bus, subjects.TRAINING_STORE, max_bytes=most, setting="RYZANSTEIN_TRAINING_MAX_BYTES")


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

    async def of(self, tenant: str, job: str) -> AsyncGenerator[KvEntry[TrainingEvent], None]:
        """Those of a job, in the order of their writing."""
        async for entry in self._bucket.scan(f"{tenant_key(tenant, job)}.*"):
            yield entry

    async def follow(self, tenant: str, job: str) -> AsyncGenerator[KvEntry[TrainingEvent] | None, None]:
        """As `of`, then None once, then each event as it is written, until nobody reads on. Where the connection was
        lost all are yielded anew: revisions tell what is known."""
        async for update in self._bucket.watch_revisions(f"{tenant_key(tenant, job)}.*"):
            if update is None:
                yield None
            elif update[1] is not None:
                yield KvEntry(update[0], update[1], update[2])

    async def clear(self, tenant: str, job: str) -> None:
        """Removes all of a job."""
        await self._bucket.purge(f"{tenant_key(tenant, job)}.*")


def object_name(job: str, attempt: int, name: str) -> str:
    """Of what an attempt writes: another one, which may still run somewhere, writes nothing over it."""
    return f"{job}/{attempt}/{name}"


def writing_of(job: str, attempt: int, name: str) -> str:
    """Its nuid, by which chunks are found that nobody names; `name` was never used before in that attempt."""
    return f"{job}.{attempt}.{name}"


async def clear_objects(objects: Objects, job: str, keep: Collection[str] = (), before: int | None = None) -> int:
    """Removes a job's objects but those named in `keep`, and what was cut off while it was written; with `before` only
    what attempts before that one have written. Returns how many. Raises `BrokerUnavailable`."""
    gone = 0
    for name in await objects.names():
        if name.startswith(f"{job}/") and name not in keep and _is_before(name.split("/"), before):
            await objects.delete(name)
            gone += 1
    known = [info.nuid for name in keep if (info := await objects.info(name)) is not None]
    for nuid in await objects.writings(f"{job}."):
        if nuid not in known and _is_before(nuid.split("."), before):
            await objects.purge(nuid)
            gone += 1
    return gone


def _is_before(parts: list[str], attempt: int | None) -> bool:
    """`parts`: the job, the attempt, the rest."""
    if attempt is None:
        return True
    return len(parts) > 2 and parts[1].isdecimal() and int(parts[1]) < attempt
