"""Whatever dies in the middle of a batch: each line is in the output once, and was generated once."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.cli.supervision.nats_server import LocalNats
from services.gateway.batches.runner import AHEAD
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.messages.batches import BatchJob
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.streams import ensure_streams
from shared.nats.tenants import tenant_key
from tests.integration.gateway.batches.helpers import (
    custom_ids,
    lines_of,
    ready,
    requests,
    submit,
    text_of,
    until_status,
)
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, say, until
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process

COUNT = 300


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gateways in this process; still longer than two renewals of another one."""
    monkeypatch.setattr("services.gateway.jobs.runners.LEASE", 5.0)


async def echo(fake: FakeRing, request: GenerationRequest) -> None:
    """Says the prompt's last word, with no hurry, so that lines are always under way."""
    await asyncio.sleep(0.01)
    await say(fake, request, bytes(request.prompt).decode().split()[-1])


async def check(client: openai.AsyncOpenAI, batch: str, ring: FakeRing, seconds: float = 60) -> None:
    """Each custom_id once, each with its own answer, each generated under one identity."""
    done = await until_status(client, batch, seconds=seconds)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": COUNT, "completed": COUNT, "failed": 0}
    answers = await lines_of(client, done.output_file_id)
    assert custom_ids(answers) == sorted(f"c{number}" for number in range(COUNT))
    assert all(text_of(answer) == answer["custom_id"] for answer in answers)
    shown = {answer["response"]["request_id"]: answer["response"]["body"]["id"] for answer in answers}
    for request in ring.requests:
        identity = request.generation_id.rpartition("-")[0]
        assert shown[request.request_id] == f"chatcmpl-{identity}", request.request_id


@contextlib.asynccontextmanager
async def begun(bus: Bus, nats: CommonSettings, directory: Path, ring: FakeRing) -> AsyncIterator[tuple[Any, str]]:
    """A gateway process in the middle of a batch."""
    ring.behave = echo
    await ready(ring, slots=24)
    async with gateway_process(bus, nats, directory) as doomed:
        async with openai.AsyncOpenAI(base_url=f"{doomed.http.base_url}/v1", api_key="none", max_retries=0) as client:
            batch = await submit(client, requests(COUNT))
        await until(lambda: len(ring.requests) > COUNT // 4, 30)
        yield doomed, batch.id


@pytest.mark.slow
async def test_the_gateway_is_killed(bus: Bus, nats_settings: CommonSettings, ring: FakeRing, tmp_path: Path) -> None:
    async with begun(bus, nats_settings, tmp_path, ring) as (doomed, batch):
        await doomed.kill()
        assert len(ring.requests) < COUNT
        async with run_gateway(nats_settings) as gateway, gateway.openai() as client:
            await check(client, batch, ring)
            async with gateway.http() as http:
                metrics = (await http.get("/metrics")).text
            assert "ryzanstein_gateway_batches_taken_over_total 1.0" in metrics
            jobs = await Bucket.open(bus, subjects.BATCHES_BUCKET, BatchJob, plain=True)
            entry = await jobs.get(tenant_key("", batch))
            assert [COUNT // 4 < begun <= COUNT + AHEAD for begun in entry.value.lost] == [True]
    assert len(ring.requests) == len({request.generation_id for request in ring.requests}) == COUNT


@pytest.mark.slow
async def test_requests_that_wait_in_the_queue_are_not_handed_in_again(
    bus: Bus, nats_settings: CommonSettings, ring: FakeRing, tmp_path: Path
) -> None:
    async with begun(bus, nats_settings, tmp_path, ring) as (doomed, batch):
        ring.taking.clear()
        waiting = 0
        async with asyncio.timeout(30):
            while waiting < 20:
                info = await bus.jetstream().stream_info(subjects.INTAKE_STREAM)
                waiting = info.state.messages
        await doomed.kill()
        async with run_gateway(nats_settings) as gateway, gateway.openai() as client:
            answers = gateway.service.work.answers
            await until(lambda: sum(answer.owned for answer in answers.all()) >= waiting, 30)
            ring.taking.set()
            await check(client, batch, ring)
    assert len(ring.requests) == len({request.generation_id for request in ring.requests}) == COUNT


@pytest.mark.slow
async def test_the_gateway_sleeps_through_the_loss_of_its_batch(
    bus: Bus, nats_settings: CommonSettings, ring: FakeRing, tmp_path: Path
) -> None:
    async with begun(bus, nats_settings, tmp_path, ring) as (doomed, batch):
        doomed.process.process.send_signal(signal.SIGSTOP)
        async with run_gateway(nats_settings) as gateway, gateway.openai() as client:
            jobs = await Bucket.open(bus, subjects.BATCHES_BUCKET, BatchJob, plain=True)
            async with asyncio.timeout(30):
                while (entry := await jobs.get(tenant_key("", batch))) is None or entry.value.owner == "doomed":
                    await bus.flush()
            doomed.process.process.send_signal(signal.SIGCONT)
            await check(client, batch, ring)


@pytest.mark.slow
async def test_the_ring_is_killed(served: openai.AsyncOpenAI, ring: FakeRing) -> None:
    lost, first = 0, ring.epoch

    async def mortal(fake: FakeRing, request: GenerationRequest) -> None:
        """The first life and the second say nothing more after a quarter of the answers each."""
        nonlocal lost
        life = fake.epoch - first + 1
        await asyncio.sleep(0.02)
        if fake.epoch - first + 1 == life and (life > 2 or fake.answered <= life * COUNT // 4):
            await say(fake, request, bytes(request.prompt).decode().split()[-1])
        else:
            lost += 1

    ring.behave = mortal
    batch = await submit(served, requests(COUNT))
    for _ in range(2):
        before = lost
        await until(lambda before=before: lost > before, 30)  # type: ignore[misc]
        ring.epoch += 1
        await ready(ring)
    await check(served, batch.id, ring)
    assert len({request.generation_id for request in ring.requests}) == COUNT


@pytest.mark.slow
async def test_nats_is_started_again(tmp_path: Path) -> None:
    server = LocalNats(tmp_path / "nats")
    await server.start()
    settings = server.settings()
    bus = await Bus.connect(settings, "test")
    ring = FakeRing(bus)
    ring.behave = echo
    try:
        await ensure_streams(bus)
        await ring.start()
        await ready(ring)
        async with run_gateway(settings) as gateway, gateway.openai() as client:
            batch = await submit(client, requests(COUNT))
            await until(lambda: len(ring.requests) > COUNT // 4, 30)
            taken = len(ring.requests)
            ring.taking.clear()
            await until(lambda: len(ring.requests) > taken)  # it asks for no more: nothing is lost on its way
            await ring.stop()
            await server.stop()
            await server.start()
            await until(lambda: bus.connected, 30)
            ring.taking.set()
            ring.resume()
            await ring.event("down")  # what it had and had not said is gone
            ring.epoch += 1
            await ready(ring)
            await check(client, batch.id, ring)
        assert len({request.generation_id for request in ring.requests}) == COUNT
    finally:
        await ring.stop()
        await bus.close()
        await server.stop()


async def test_two_gateways_race_for_every_batch(
    nats_settings: CommonSettings, gateway: RunningGateway, served: openai.AsyncOpenAI, ring: FakeRing
) -> None:
    async with run_gateway(nats_settings):
        batches = [await submit(served, requests(20)) for _ in range(6)]
        for batch in batches:
            done = await until_status(served, batch.id)
            assert done.request_counts.completed == 20
    assert len(ring.requests) == len({request.generation_id for request in ring.requests}) == 120
