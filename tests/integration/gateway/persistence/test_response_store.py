"""What is kept of responses: bounded in time and bytes, written once, renewed by those who go on with it."""

import asyncio
import re
import secrets
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from services.gateway.persistence import store as store_module
from services.gateway.persistence.budget import ByteBudget
from services.gateway.persistence.store import ResponseStore
from shared.config import CommonSettings
from shared.errors import PayloadTooLarge
from shared.limits import HISTORY_READS
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord, ResponsePart, ResponseRecord, StoredResponse
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.kv import Bucket
from shared.nats.tenants import Quota, tenant_key
from tests.chaos.broker import Broker
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying
from tests.integration.gateway.responding import until_known

PAGE = (Path(__file__).parents[4] / "docs" / "responses.md").read_text()


def response(number: int, text: str = "", tenant: str = "") -> StoredResponse:
    identity = f"{number:032x}"
    request = GenerationRequest(f"{identity}-0", "r", "m", "g", [0], 9, tenant=tenant)
    made = ResponseRecord(b"{}", b"[]")
    record = GenerationRecord(identity, "responses", 0.0, [request], tenant=tenant, response=made)
    return StoredResponse(record, [1, 2], text.encode())


AMPLE = Quota(1 << 30, 10_000)


async def store_of(bus: Bus, ttl: float = 1000.0, max_bytes: int = 1 << 20, quota: Quota = AMPLE) -> ResponseStore:
    store = ResponseStore(bus, ttl, max_bytes, quota)
    await store.bucket.ensure()
    return store


async def test_the_oldest_make_room(bus: Bus) -> None:
    store = await store_of(bus, max_bytes=20_000)
    kept = [response(number, "".join(f"{number * index * 7919:x}" for index in range(1500))) for number in range(1, 9)]
    for each in kept:
        await store.keep(each)
    found = [await store.get(each.record.identity, "") for each in kept]
    assert found[0] is None
    assert found[-1] == kept[-1]
    held = [each for each in found if each is not None]
    assert held == kept[-len(held) :]
    other = await store_of(bus, max_bytes=1 << 20)  # more room is given at the next start
    await other.keep(kept[0])
    assert await other.get(kept[0].record.identity, "") == kept[0]
    assert await other.get(kept[-1].record.identity, "") == kept[-1]


async def test_one_tenant_s_responses_make_room_for_its_own_alone(bus: Bus) -> None:
    """With the bucket's own limit alone, the tenant that writes most would flush all the others' conversations."""
    store = await store_of(bus, quota=Quota(100_000, 1000))
    theirs = [response(number, "theirs", "other") for number in range(1000, 1003)]
    for each in theirs:
        await store.keep(each)
    mine = [response(number, secrets.token_hex(4000), "acme") for number in range(1, 101)]
    for each in mine:
        await store.keep(each)
        await store._trimmed.looked()
    for each in theirs:
        assert await store.get(each.record.identity, "other") == each
        assert await store.get(each.record.identity, "acme") is None
    left = [each for each in mine if await store.get(each.record.identity, "acme") is not None]
    assert left == mine[-len(left) :]
    info = await bus.jetstream().stream_info(f"KV_{subjects.RESPONSES_BUCKET}")
    assert 80_000 < info.state.bytes < 130_000


async def test_many_small_responses_of_a_tenant_are_bounded(bus: Bus) -> None:
    store = await store_of(bus, quota=Quota(1 << 30, 32))
    for number in range(1, 101):
        await store.keep(response(number, "x", "acme"))
        await store._trimmed.looked()
    info = await bus.jetstream().stream_info(f"KV_{subjects.RESPONSES_BUCKET}")
    assert info.state.messages <= 34


async def test_what_the_version_before_kept_is_shown_and_deleted(bus: Bus) -> None:
    store = await store_of(bus)
    whole = response(1, "whole", "acme")
    await store.keep(whole)
    plain = await Bucket.open(bus, subjects.RESPONSES_BUCKET, ResponsePart, plain=True)
    entry = await plain.get(f"acme.{whole.record.identity}")
    await plain.put(whole.record.identity, entry.value)
    await plain.purge(entry.key)
    assert await store.get(whole.record.identity, "acme") == whole
    await store.delete(whole.record.identity, "acme")
    assert await store.get(whole.record.identity, "acme") is None
    assert await store.is_deleted(whole.record.identity, "acme")


async def test_a_small_broker_gives_what_it_has(tmp_path: Path) -> None:
    """NATS sets aside what a stream may come to; a laptop's disk may not have as much as is set."""
    server = Broker(tmp_path / "nats", quota=40 << 20)
    await server.up()
    try:
        bus = await Bus.connect(server.settings(), "test")
        store = ResponseStore(bus, 60.0, 256 << 20, AMPLE)
        await store.bucket.ensure()
        info = await bus.jetstream().stream_info(f"KV_{subjects.RESPONSES_BUCKET}")
        assert info.config.max_bytes == 4 << 20
        await bus.close()
    finally:
        await server.down()


async def test_what_is_read_is_charged_decompressed_and_before_it_is(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    store, kept = await store_of(bus), response(1, "a" * 100_000)
    await store.keep(kept)
    reads = ByteBudget(HISTORY_READS, 250_000)
    for count in (1, 2):
        assert await store.get(kept.record.identity, "", reads) == kept
        assert reads.used == count * len(encode(kept))
    inflating = store_module.inflated
    monkeypatch.setattr(store_module, "inflated", None)  # it is not
    with pytest.raises(PayloadTooLarge, match="limit history_reads"):
        await store.get(kept.record.identity, "", reads)
    monkeypatch.setattr(store_module, "inflated", inflating)
    head = await store.bucket.get("", kept.record.identity)
    older = msgspec.structs.replace(head.value, size=0)  # which does not say its size
    await store.bucket.update(head.key, older, head.revision)
    with pytest.raises(PayloadTooLarge, match="limit history_reads"):
        await store.get(kept.record.identity, "", reads)


async def test_the_first_to_write_has_written_it(bus: Bus) -> None:
    store = await store_of(bus)
    await store.keep(response(1, "first"))
    await store.keep(response(1, "second"))
    found = await store.get(f"{1:032x}", "")
    assert found.response == b"first"
    await store.delete(f"{1:032x}", "")
    await store.keep(response(1, "third"))
    assert await store.get(f"{1:032x}", "") is None
    assert await store.is_deleted(f"{1:032x}", "")


async def test_a_missing_part_is_a_missing_response(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.persistence.store.ROOM", bus.max_payload - 50)
    store = await store_of(bus)
    whole = response(1, "".join(f"{index * 7919:x}" for index in range(100)))
    await store.keep(whole)
    assert await store.get(whole.record.identity, "") == whole
    await store.bucket.delete(tenant_key("", f"{whole.record.identity}-1"))
    assert await store.get(whole.record.identity, "") is None


async def test_its_time_begins_anew_once_it_is_half_over(bus: Bus) -> None:
    store = await store_of(bus)
    identity = response(1).record.identity
    await store.keep(response(1))
    await store.refresh(identity, "")
    head = await store.bucket.get("", identity)
    await store.bucket.put("", identity, msgspec.structs.replace(head.value, kept_at=head.value.kept_at - 501))
    await store.refresh(identity, "")
    later = await store.bucket.get("", identity)
    assert later.value.kept_at >= head.value.kept_at
    assert await store.get(identity, "") == response(1)
    await store.refresh(f"{2:032x}", "")
    assert not await store.is_known(f"{2:032x}", "")


async def test_a_response_has_its_time(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, response_ttl=1.0) as gateway, gateway.openai() as client:
        made = await client.responses.create(model=MODEL, input="Hi")

        async def gone() -> str | None:
            try:
                await client.responses.retrieve(made.id)
            except openai.NotFoundError as error:
                return str(error.code)
            return None

        assert await until_known(gone) == "response_not_found"


async def test_the_pages_example(gateway: RunningGateway, ring: FakeRing) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ring.behave = saying("A story, and its end.")
    shown: list[str] = []

    def show(text: str, end: str = "\n") -> None:
        shown.append(text + end)

    names: dict[str, Any] = {"MODEL": MODEL, "print": show}
    await asyncio.to_thread(exec, source.replace("http://127.0.0.1:8000", gateway.url), names)
    names["client"].close()
    assert "".join(shown) == "A story, and its end.\n" + "A story, and its end."
    assert names["job"].status == "queued"
    assert len(ring.requests) == 3
