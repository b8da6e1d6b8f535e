"""What tenants keep in KV buckets: keys that begin with the tenant, and how much each has.

    <tenant>.<name>     both escaped; `=` stands for no tenant, which no escaped name is
    <name>              as versions before wrote them: found, changed and removed where they are, and never written

So the entries of one tenant are read without those of the others, however many these have.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog

from shared.errors import RyzansteinError
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, Contention, KvEntry
from shared.nats.subjects import escape
from shared.tasks import TaskSet

T = TypeVar("T", bound=msgspec.Struct)

log = structlog.get_logger(__name__)

NOBODY = "="  # the tenant of requests without a key
OLD = "*"  # keys of one token
# Quotas of what makes room by itself are kept up to this part of them: a tenant's entries are looked through once
# for as much as that is newly written, by each gateway.
SLACK = 16

# Seconds after which the mark of a deleted entry goes too: by then every gateway has heard of it.
MARKS_KEPT = 60.0
MARKS_AT_ONCE = 256


def tenant_key(tenant: str, name: str) -> str:
    """The NATS key of `name`."""
    return f"{escape(tenant) if tenant else NOBODY}.{escape(name)}"


def keys_of(tenant: str) -> str:
    return f"{escape(tenant) if tenant else NOBODY}.*"


class TenantBucket(Generic[T]):
    """Methods raise `BrokerUnavailable`. Entries come with NATS keys, which `update`, `delete` and `purge` take."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        kind: type[T],
        owner: Callable[[T], str] | None = None,
        *,
        ttl: float | None = None,
        max_bytes: int = 0,
    ) -> None:
        """As `Bucket`. `owner`: the tenant of a value, for keys that do not say it; None: whoever reads it looks."""
        self._bucket = bucket = Bucket(bus, name, kind, ttl=ttl, max_bytes=max_bytes, plain=True)
        self._owner = owner
        self.ensure, self.update, self.delete = bucket.ensure, bucket.update, bucket.delete
        self.purge = bucket.purge
        self.watch_revisions, self.follow_revisions = bucket.watch_revisions, bucket.follow_revisions

    async def get(self, tenant: str, name: str) -> KvEntry[T] | None:
        """None where there is none of that tenant."""
        entry = await self._bucket.get(tenant_key(tenant, name))
        return entry if entry is not None else await self._old(tenant, name)

    async def _old(self, tenant: str, name: str) -> KvEntry[T] | None:
        entry = await self._bucket.get(escape(name))
        mine = entry is not None and (self._owner is None or self._owner(entry.value) == tenant)
        return entry if mine else None

    async def at(self, key: str) -> T | None:
        """The value at a NATS key."""
        entry = await self._bucket.get(key)
        return None if entry is None else entry.value

    async def put(self, tenant: str, name: str, value: T) -> int:
        """Writes without condition; returns the revision."""
        return await self._bucket.put(tenant_key(tenant, name), value)

    async def create(self, tenant: str, name: str, value: T) -> int | None:
        """Writes if there is no entry; None when there is one."""
        if await self._old(tenant, name) is not None:
            return None
        return await self._bucket.create(tenant_key(tenant, name), value)

    async def change(self, tenant: str, name: str, made: Callable[[T], T], what: str) -> T | None:
        """Has the entry hold what `made` makes of it, called again where others were first; None where there is none.
        Writes nothing where `made` returns what it was given. `what` it is, as an error calls it."""
        contention = Contention(what)
        while (entry := await self.get(tenant, name)) is not None:
            changed = made(entry.value)
            if changed is entry.value or await self.update(entry.key, changed, entry.revision) is not None:
                return changed
            contention.lost()
        return None

    async def of(self, tenant: str) -> AsyncGenerator[KvEntry[T], None]:
        """The entries of a tenant, those with old keys first; one that changes meanwhile once, as it is then."""
        found: dict[str, KvEntry[T]] = {}
        if self._owner is not None:
            async for entry in self._bucket.scan(OLD):
                if self._owner(entry.value) == tenant:
                    found[entry.key] = entry
        async for entry in self._bucket.scan(keys_of(tenant)):
            found[entry.key] = entry
        for entry in found.values():
            yield entry

    async def trim(self, tenant: str, quota: "Quota") -> int:
        """Removes the oldest entries of a tenant beyond its quota; returns how many."""
        sizes: dict[str, int] = {}
        async for key, size in self._bucket.sizes(keys_of(tenant)):
            sizes.pop(key, None)  # it has changed meanwhile, and is the newest
            sizes[key] = size
        gone = list(beyond([*sizes.items()], quota.max_bytes, quota.max_entries))
        for key in gone:
            await self.purge(key)
        return len(gone)


def beyond(sizes: list[tuple[str, int]], max_bytes: int, max_entries: int) -> Iterator[str]:
    """Which of these, the oldest first, must go so that no more than that is left. Pure."""
    held, entries = sum(size for _, size in sizes), len(sizes)
    for key, size in sizes:
        if held <= max_bytes and entries <= max_entries:
            return
        yield key
        held, entries = held - size, entries - 1


class Quota(NamedTuple):
    """What a tenant may have in a bucket."""

    max_bytes: int
    max_entries: int


class Trimmed(Generic[T]):
    """Keeps each tenant's entries within its quota: its own oldest make room, and nobody else's.

    A tenant's entries are looked through when this gateway has written a SLACK-th of the quota, so writing costs
    no reading; the tenant may have that much more for each gateway that writes for it.
    """

    def __init__(self, bucket: TenantBucket[T], quota: Quota) -> None:
        self._bucket = bucket
        self._quota = quota
        # Bytes and entries since the last look, by tenant; none: it was never looked.
        self._written: dict[str, tuple[int, int]] = {}
        self._looking = TaskSet()

    def wrote(self, tenant: str, size: int) -> None:
        """An entry of `size` bytes was written."""
        known = self._written.get(tenant)
        held = (size, 1) if known is None else (known[0] + size, known[1] + 1)
        self._written[tenant] = held
        if known is None or any(new * SLACK >= most for new, most in zip(held, self._quota, strict=True)):
            self._written[tenant] = (0, 0)
            self._looking.spawn(self._look(tenant))

    async def _look(self, tenant: str) -> None:
        try:
            gone = await self._bucket.trim(tenant, self._quota)
        except RyzansteinError as error:
            self._written.pop(tenant, None)  # with the next writing
            log.info("quota_check_failed", error=str(error))
        else:
            if gone:
                log.info("oldest_entries_deleted", tenant=tenant, entries=gone)

    async def looked(self) -> None:
        """Waits for what is being looked through."""
        await self._looking.finished()


class DeletionMarkers(Generic[T]):
    """What NATS keeps of deleted entries for watchers, removed when every watcher has heard of it.

    Without this each deletion would leave a message for good, or for the bucket's time to live.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, key: str, revision: int, now: float) -> None:
        """A watcher has shown a deletion; `now`: monotonic seconds."""
        if revision:
            self._seen[key] = revision, now

    async def sweep(self, bucket: TenantBucket[T], now: float) -> None:
        """Removes those that are old, some at a time. Raises `BrokerUnavailable`."""
        old = [key for key, (_, seen) in self._seen.items() if seen <= now - MARKS_KEPT]
        for key in old[:MARKS_AT_ONCE]:
            revision, _ = self._seen[key]
            await bucket.purge(key, before=revision + 1)
            self._seen.pop(key, None)


class Held(NamedTuple):
    """What is known of an entry."""

    tenant: str
    size: int
    due: float  # Unix seconds at which it goes; 0: never


class Holdings:
    """How many entries and bytes each tenant has, told entry by entry. Pure."""

    def __init__(self) -> None:
        self._by_key: dict[str, Held] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        self.size = 0  # of all tenants

    def note(self, key: str, held: Held) -> None:
        """There is an entry, or it is another one now."""
        self.forget(key)
        self._by_key[key] = held
        self._add(held, 1)

    def forget(self, key: str) -> None:
        """It is gone; no error where it was not known."""
        held = self._by_key.pop(key, None)
        if held is not None:
            self._add(held, -1)

    def _add(self, held: Held, sign: int) -> None:
        entries, size = self.of(held.tenant)
        entries, size = entries + sign, size + sign * held.size
        self.size += sign * held.size
        if entries:
            self._sums[held.tenant] = entries, size
        else:
            self._sums.pop(held.tenant, None)

    def of(self, tenant: str) -> tuple[int, int]:
        """Entries and bytes of a tenant."""
        return self._sums.get(tenant, (0, 0))

    def due(self, now: float) -> list[str]:
        """The entries whose time has come."""
        return [key for key, held in self._by_key.items() if 0 < held.due <= now]
