"""One tenant's batches neither hold up another's nor grow without bound; files that cannot be written end a batch."""

import asyncio
import time
from dataclasses import replace

import httpx
import pytest
from msgspec import structs

from services.gateway.batches import runner
from services.gateway.jobs import leases, runners
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.messages.batches import BatchJob
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.batches.helpers import CHAT, OVER, lines_of, ready, requests, submit, until_status
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, say, until


async def submitted(http: httpx.AsyncClient, headers: dict[str, str], lines: int = 1) -> httpx.Response:
    form = {"data": {"purpose": "batch"}, "files": {"file": ("input.jsonl", requests(lines))}}
    file = (await http.post("/v1/files", headers=headers, **form)).json()["id"]  # type: ignore[arg-type]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    return await http.post("/v1/batches", headers=headers, json=body)


@pytest.mark.slow
async def test_one_tenants_batches_make_room_for_anothers(
    nats_settings: CommonSettings, ring: FakeRing, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "TURN", 2.0)
    monkeypatch.setattr(runners, "WAITS", 0.0)
    gate = asyncio.Event()

    async def held(fake: FakeRing, request: GenerationRequest) -> None:
        if request.tenant == "busy":
            await gate.wait()
        await say(fake, request)

    ring.behave = held
    await ready(ring)
    busy, other = bearer(await keys.make("busy")), bearer(await keys.make("other"))
    async with run_gateway(nats_settings, batch_jobs=1) as gateway, gateway.http() as http:
        for key in (busy, other):
            await changes_to(gateway, key, 200)
        first = [(await submitted(http, busy)).json()["id"] for _ in range(3)]
        await until(lambda: len(ring.requests) == 1)
        theirs = (await submitted(http, other)).json()["id"]
        assert await outcome(http, theirs, other) == "completed"
        gate.set()
        assert [await outcome(http, batch, busy) for batch in first] == ["completed"] * 3
    asked = [request.generation_id for request in ring.requests]
    assert len(asked) == len(set(asked)) == 4, "what was under way was gone on with"


async def outcome(http: httpx.AsyncClient, batch: str, headers: dict[str, str]) -> str:
    """Its status once it is over."""
    async with asyncio.timeout(40):
        while True:
            status = str((await http.get(f"/v1/batches/{batch}", headers=headers)).json()["status"])
            if status in OVER:
                return status
            await asyncio.sleep(0.05)


async def test_batches_that_are_not_over_are_bounded(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, tenant_batches=2) as gateway, gateway.http() as http:
        made = [(await submitted(http, {})).json()["id"] for _ in range(2)]
        answer = await submitted(http, {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
        assert "limit tenant_batches: 2 entries, RYZANSTEIN_TENANT_BATCHES" in answer.json()["error"]["message"]
        await http.post(f"/v1/batches/{made[0]}/cancel")
        assert await outcome(http, made[0], {}) == "cancelled"
        assert (await submitted(http, {})).status_code == 200


async def test_a_repeat_is_not_refused(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, tenant_batches=1) as gateway, gateway.openai() as client:
        file = await client.files.create(file=("input.jsonl", requests(1)), purpose="batch")
        again = [
            await client.batches.create(
                input_file_id=file.id,
                endpoint=CHAT,
                completion_window="24h",
                extra_headers={"Idempotency-Key": "nightly"},
            )
            for _ in range(2)
        ]
        assert again[0].id == again[1].id


async def test_the_oldest_that_are_over_are_forgotten(
    gateway: RunningGateway, ring: FakeRing, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "FORGOTTEN_AT_ONCE", 1)
    jobs = gateway.service._work._jobs[0]._jobs  # type: ignore[union-attr]
    jobs.traits = replace(jobs.traits, known=structs.replace(jobs.traits.known, value=3))
    await ready(ring)
    async with gateway.openai() as client:
        made = []
        for _ in range(4):
            made.append((await submit(client, requests(1))).id)
            await until_status(client, made[-1])
            while not (await jobs.get(made[-1], "")).clean:  # type: ignore[union-attr]
                await bus.flush()
        assert {batch.id for batch in (await client.batches.list()).data} == set(made[1:])


async def test_files_that_cannot_be_written_end_the_batch(
    nats_settings: CommonSettings, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "FINISH_WITHIN", 0.5)
    await ready(ring)
    async with run_gateway(nats_settings, tenant_file_bytes=1000) as gateway, gateway.openai() as client:
        batch = await submit(client, requests(4))
        files = gateway.service._backend.parts.files
        files._quota = 1  # after the upload
        done = await until_status(client, batch.id)
        assert done.status == "failed"
        assert done.errors.data is not None
        (error,) = done.errors.data
        assert error.code == "quota_exceeded"
        assert "RYZANSTEIN_TENANT_FILE_BYTES" in (error.message or "")
        assert done.output_file_id is None


async def test_results_of_one_batch_are_bounded(nats_settings: CommonSettings, ring: FakeRing) -> None:
    """They lie with those of all tenants until the batch's files are written."""
    await ready(ring)
    settings = {"tenant_file_bytes": 20_000, "batch_parallelism": 2}
    async with run_gateway(nats_settings, **settings) as gateway, gateway.openai() as client:
        batch = await submit(client, requests(100))
        done = await until_status(client, batch.id)
        assert done.status == "failed"
        assert [error.code for error in done.errors.data] == ["quota_exceeded"]
        assert "limit tenant_file_bytes: 20,000 bytes" in (done.errors.data[0].message or "")
        kept = await lines_of(client, done.output_file_id)
        assert 10 < len(kept) == done.request_counts.completed < 100


async def test_a_batch_of_the_version_before_is_run_where_it_is(
    gateway: RunningGateway, ring: FakeRing, bus: Bus
) -> None:
    await ready(ring)
    async with gateway.openai() as client:
        file = await client.files.create(file=("input.jsonl", requests(3)), purpose="batch")
        old = await Bucket.open(bus, subjects.BATCHES_BUCKET, BatchJob)
        now = time.time()
        job = BatchJob("batch_old", "", now, CHAT, file.id, file.id, "24h", now + 3600)
        await old.create(job.id, job)
        done = await until_status(client, "batch_old")
        assert done.status == "completed"
        assert len(await lines_of(client, done.output_file_id)) == 3
        newer = await submit(client, requests(1))
        assert [one.id for one in (await client.batches.list()).data] == [newer.id, "batch_old"]
        assert "batch_old" in await old.items(), "where it was written"
