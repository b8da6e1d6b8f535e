"""A change of what others change all the time ends with an error that names it, wherever it is made."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway.batches import states
from services.gateway.batches.service import batch_jobs
from services.gateway.lifecycle.claims import GenerationClaims
from services.gateway.persistence.chats import ChatIndex
from services.gateway.ratelimit.shared_windows import SharedWindows
from shared.errors import BrokerUnavailable
from shared.messages.batches import BatchJob
from shared.messages.records import Ownership, StoredChat
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.tenants import Quota

WITHIN = 60.0


async def _batch(bus: Bus) -> Callable[[], Awaitable[object]]:
    jobs = batch_jobs(bus, 10)
    await jobs.bucket.ensure()
    await jobs.create(BatchJob("batch_1", "t", 1.0, "/v1/completions", "f", "f", "24h", 2.0))
    return lambda: jobs.change("batch_1", "t", lambda job: states.announced(job, job.begun + 1))


async def _lease(bus: Bus) -> Callable[[], Awaitable[object]]:
    jobs = batch_jobs(bus, 10)
    await jobs.bucket.ensure()
    job = BatchJob("batch_1", "t", 1.0, "/v1/completions", "f", "f", "24h", 2.0)
    await jobs.create(job)
    entry = await jobs.bucket.get("t", "batch_1")
    lease = await jobs.claim(entry.key, job, entry.revision, "g")
    return lambda: lease.write(lambda job: job)


async def _claim(bus: Bus) -> Callable[[], Awaitable[object]]:
    claims = GenerationClaims(bus, "g", 60.0)
    await claims.bucket.ensure()
    await claims.bucket.put("i", Ownership("lost", []))
    return lambda: claims.claim("i", "lost", [])


async def _chat(bus: Bus) -> Callable[[], Awaitable[object]]:
    chats = ChatIndex(bus, 60.0, Quota(1 << 20, 10))
    await chats.bucket.ensure()
    await chats.add(StoredChat("i", "chatcmpl-i", "t", "m", 1.0))
    return lambda: chats.change("i", "t", {"a": "b"})


async def _window(bus: Bus) -> Callable[[], Awaitable[object]]:
    windows = SharedWindows(bus)
    await windows.bucket.ensure()
    return lambda: windows.spend("key/requests", 10, 1)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (_batch, "the batch batch_1"),
        (_lease, "the batch batch_1"),
        (_claim, "the owner of the generation i"),
        (_chat, "the chat completion i"),
        (_window, "the rate limit key/requests"),
    ],
)
async def test_a_change_that_is_overtaken_each_time_ends(
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[Bus], Awaitable[Callable[[], Awaitable[object]]]],
    what: str,
) -> None:
    overtaking = False
    update, create = Bucket.update, Bucket.create

    async def updated(self: Bucket[BatchJob], key: str, value: BatchJob, revision: int) -> int | None:
        return None if overtaking else await update(self, key, value, revision)

    async def created(self: Bucket[BatchJob], key: str, value: BatchJob) -> int | None:
        return None if overtaking else await create(self, key, value)

    monkeypatch.setattr(Bucket, "update", updated)
    monkeypatch.setattr(Bucket, "create", created)
    change = await made(bus)
    overtaking = True
    with pytest.raises(BrokerUnavailable, match=f"Others change {what} too often"):
        async with asyncio.timeout(WITHIN):
            await change()
