"""What files a tenant may have: counted from an upload's beginning, at all gateways, and no other tenant's loss."""

import asyncio
from typing import Any

import httpx
import pytest

from services.gateway.core.errors import QuotaExceeded
from services.gateway.files.files import FOR_OUTPUTS
from shared.config import CommonSettings
from shared.messages.batches import FileRecord
from shared.nats import subjects, tenants
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.batches.test_files import FILES, parts, stored
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import until

KIB = 1 << 10


async def upload(http: httpx.AsyncClient, size: int, headers: dict[str, str] | None = None) -> httpx.Response:
    form: dict[str, Any] = {"data": {"purpose": "user_data"}, "files": {"file": ("a", b"x" * size)}}
    return await http.post(FILES, headers=headers, **form)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_the_bytes_of_one_tenant_are_bounded(nats_settings: CommonSettings, bus: Bus, keys: Keys) -> None:
    mine, other = bearer(await keys.make("acme")), bearer(await keys.make("other"))
    async with run_gateway(nats_settings, tenant_file_bytes=300 * KIB) as gateway, gateway.http() as http:
        for key in (mine, other):
            await changes_to(gateway, key, 200)
        first = await upload(http, 200 * KIB, mine)
        assert first.status_code == 200
        before = await stored(bus)
        again = await upload(http, 200 * KIB, mine)
        assert refusal(again) == (429, "quota_exceeded")
        assert (
            "limit tenant_file_bytes: 307,200 bytes, RYZANSTEIN_TENANT_FILE_BYTES" in again.json()["error"]["message"]
        )
        assert again.headers["x-should-retry"] == "false"
        assert refusal(await upload(http, 301 * KIB, mine)) == (413, "payload_too_large")
        assert await stored(bus) == before
        assert (await upload(http, 200 * KIB, other)).status_code == 200
        await http.delete(f"{FILES}/{first.json()['id']}", headers=mine)
        assert (await upload(http, 200 * KIB, mine)).status_code == 200


async def test_the_number_of_one_tenant_s_files_is_bounded_at_all_gateways(nats_settings: CommonSettings) -> None:
    async with (
        run_gateway(nats_settings, tenant_files=3) as one,
        run_gateway(nats_settings, tenant_files=3) as two,
        one.http() as http,
        two.http() as elsewhere,
    ):
        for _ in range(3):
            assert (await upload(http, 10)).status_code == 200
        await until(lambda: two.service._backend.parts.files._held.of("")[0] == 3)
        for client in (http, elsewhere):
            answer = await upload(client, 10)
            assert refusal(answer) == (429, "quota_exceeded")
            assert "limit tenant_files: 3 entries, RYZANSTEIN_TENANT_FILES" in answer.json()["error"]["message"]


async def test_uploads_under_way_are_counted(nats_settings: CommonSettings) -> None:
    async with run_gateway(nats_settings, tenant_file_bytes=300 * KIB) as gateway:
        files, began, go_on = gateway.service._backend.parts.files, asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            began.set()
            yield b"x"
            await go_on.wait()

        async def receive(size: int) -> None:
            async with files.receive("acme", "a", slow(), size) as record:
                await files.publish(record)

        under_way = asyncio.create_task(receive(200 * KIB))
        await began.wait()
        for size in (200 * KIB, 101 * KIB):
            with pytest.raises(QuotaExceeded):
                await receive(size)
        unknown = asyncio.create_task(receive(-1))  # takes what is left
        await until(lambda: files._held.of("acme") == (2, 300 * KIB))
        with pytest.raises(QuotaExceeded):
            await receive(1)
        go_on.set()
        await asyncio.gather(under_way, unknown)
        assert files._held.of("acme") == (2, 2), "what it has come to"


async def test_uploads_leave_room_for_outputs(nats_settings: CommonSettings) -> None:
    most = 1 << 20
    async with run_gateway(nats_settings, files_max_bytes=most) as gateway, gateway.http() as http:
        uploads = most - most // FOR_OUTPUTS
        assert (await upload(http, uploads - 64 * KIB)).status_code == 200
        answer = await upload(http, 128 * KIB)
        assert refusal(answer) == (507, "storage_full")
        assert "RYZANSTEIN_FILES_MAX_BYTES" in answer.json()["error"]["message"]
        files = gateway.service._backend.parts.files
        output = FileRecord("file-out", "other", "o", "batch_output", 1.0, "file-out")
        assert (await files.put(output, parts(b"x" * (200 * KIB)))).bytes == 200 * KIB


async def test_outputs_are_bounded_too(nats_settings: CommonSettings) -> None:
    async with run_gateway(nats_settings, tenant_file_bytes=100 * KIB) as gateway:
        files = gateway.service._backend.parts.files
        outputs = [FileRecord(name, "acme", name, "batch_output", 1.0, name) for name in ("one", "two")]
        await files.put(outputs[0], parts(b"x" * (150 * KIB)))
        with pytest.raises(QuotaExceeded, match="RYZANSTEIN_TENANT_FILE_BYTES"):
            await files.put(outputs[1], parts(b"x" * (150 * KIB)))


async def test_uploads_are_counted_as_requests(nats_settings: CommonSettings) -> None:
    async with run_gateway(nats_settings, requests_per_minute=2) as gateway, gateway.http() as http:
        answers = [(await upload(http, 10)) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"


async def test_marks_of_removed_files_go_too(
    gateway: RunningGateway, http: httpx.AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = gateway.service._backend.parts.files
    made = [(await upload(http, 10)).json()["id"] for _ in range(3)]
    for file in made[:2]:
        await http.delete(f"{FILES}/{file}")
    await until(lambda: len(files._marks) == 2)
    await files.sweep(0.0)
    assert len(files._marks) == 2, "another gateway may not have heard of it yet"
    monkeypatch.setattr(tenants, "MARKS_KEPT", 0.0)
    await files.sweep(0.0)
    bucket = await Bucket.open(bus, subjects.FILES_BUCKET, FileRecord)
    assert (await bus.jetstream().stream_info(f"KV_{subjects.FILES_BUCKET}")).state.messages == 1
    assert [record.id for record in (await bucket.items()).values()] == made[2:]
