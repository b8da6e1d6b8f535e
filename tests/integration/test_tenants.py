"""Buckets of tenants on a real NATS: one tenant's entries without the others', and a quota for each."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.messages.batches import FileRecord
from shared.nats import streams
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry
from shared.nats.streams import PAGE
from shared.nats.tenants import SLACK, Quota, TenantBucket, Trimmed

NAME = "test"


def record(tenant: str, name: str, filename: str = "a") -> FileRecord:
    return FileRecord(name, tenant, filename, "batch", 1.0, name)


async def opened(bus: Bus) -> TenantBucket[FileRecord]:
    bucket = TenantBucket(bus, NAME, FileRecord, lambda value: value.tenant)
    await bucket.ensure()
    return bucket


async def names(bucket: TenantBucket[FileRecord], tenant: str) -> list[str]:
    return [entry.value.id async for entry in bucket.of(tenant)]


async def test_a_tenant_has_its_own_entries_alone(bus: Bus) -> None:
    bucket = await opened(bus)
    for tenant in ("", "acme", "other/one", "*"):
        assert await bucket.create(tenant, "one", record(tenant, "one")) is not None
        assert await bucket.create(tenant, "one", record(tenant, "one")) is None
    for tenant in ("", "acme", "other/one", "*"):
        entry = await bucket.get(tenant, "one")
        assert entry.value.tenant == tenant
        assert await names(bucket, tenant) == ["one"]
    assert await bucket.get("acme.one", "x") is None
    assert await names(bucket, "nobody") == []


async def test_a_change_that_others_overtake_is_made_of_what_they_wrote(bus: Bus) -> None:
    bucket = await opened(bus)
    await bucket.create("acme", "one", record("acme", "one"))
    entry = await bucket.get("acme", "one")
    assert entry is not None
    others = [record("acme", "one", "theirs")]

    async def change(key: str, value: FileRecord, revision: int) -> int | None:
        if others:
            await bucket.put("acme", "one", others.pop())
        return await update(key, value, revision)

    update, bucket.update = bucket.update, change  # type: ignore[method-assign]
    renamed = await bucket.change(
        "acme", "one", lambda known: record("acme", "one", f"{known.filename}, renamed"), "it"
    )
    assert renamed.filename == "theirs, renamed"
    same = await bucket.change("acme", "one", lambda known: known, "it")
    assert same == renamed
    after = await bucket.get("acme", "one")
    assert after.revision == entry.revision + 2, "what changes nothing is not written"
    assert await bucket.change("acme", "two", lambda known: known, "it") is None


async def test_more_entries_than_a_page_are_all_read(bus: Bus) -> None:
    bucket = await opened(bus)
    wanted = [f"file-{number:04}" for number in range(2 * PAGE + 3)]
    for tenant in ("acme", "other"):
        for begin in range(0, len(wanted), 100):
            group = wanted[begin : begin + 100]
            await asyncio.gather(*(bucket.put(tenant, name, record(tenant, name)) for name in group))
    assert sorted(await names(bucket, "acme")) == wanted


async def test_an_entry_that_changes_while_it_is_read_comes_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PAGE", 1)
    bucket = await opened(bus)
    for name in "abc":
        await bucket.put("acme", name, record("acme", name))
    scan = bucket._bucket.scan

    async def disturbed(keys: str) -> AsyncIterator[KvEntry[FileRecord]]:
        async for entry in scan(keys):
            yield entry
            if entry.value.filename == "a" and entry.value.id == "a":
                await bucket.put("acme", "a", record("acme", "a", "changed"))

    monkeypatch.setattr(bucket._bucket, "scan", disturbed)
    found = [(entry.value.id, entry.value.filename) async for entry in bucket.of("acme")]
    assert sorted(found) == [("a", "changed"), ("b", "a"), ("c", "a")]


async def test_what_versions_before_wrote_is_found_where_it_is(bus: Bus) -> None:
    old = await Bucket.open(bus, NAME, FileRecord)
    await old.put("file-1", record("acme", "file-1"))
    bucket = await opened(bus)
    entry = await bucket.get("acme", "file-1")
    assert await bucket.get("other", "file-1") is None
    assert await bucket.create("acme", "file-1", record("acme", "file-1")) is None
    await bucket.put("acme", "file-2", record("acme", "file-2"))
    assert await names(bucket, "acme") == ["file-1", "file-2"]
    assert await names(bucket, "other") == []
    changed = record("acme", "file-1", "b")
    assert await bucket.update(entry.key, changed, entry.revision) is not None
    assert (await old.items())["file-1"] == changed
    await bucket.delete(entry.key)
    assert await names(bucket, "acme") == ["file-2"]


async def test_what_is_purged_leaves_nothing(bus: Bus) -> None:
    bucket = await opened(bus)
    revision = await bucket.put("acme", "one", record("acme", "one"))
    entry = await bucket.get("acme", "one")
    await bucket.purge(entry.key, before=revision)
    assert await bucket.get("acme", "one") is not None, "it was written then"
    await bucket.purge(entry.key)
    assert (await bus.jetstream().stream_info(f"KV_{NAME}")).state.messages == 0


async def test_only_the_tenant_s_own_oldest_make_room(bus: Bus) -> None:
    bucket = await opened(bus)
    quota = Trimmed(bucket, Quota(1 << 20, 2 * SLACK))
    for name in ("a", "b"):
        await bucket.put("other", name, record("other", name))
    for number in range(5 * SLACK):
        await bucket.put("acme", f"{number:03}", record("acme", f"{number:03}"))
        quota.wrote("acme", 100)
    await quota.looked()
    left = await names(bucket, "acme")
    assert len(left) <= 2 * SLACK + 2
    assert left == [f"{number:03}" for number in range(5 * SLACK)][-len(left) :]
    assert await names(bucket, "other") == ["a", "b"]
    await bucket.put("acme", "large", record("acme", "large", "x" * (1 << 20)))
    quota.wrote("acme", 1 << 20)
    await quota.looked()
    assert await names(bucket, "acme") == []
    assert await names(bucket, "other") == ["a", "b"]
