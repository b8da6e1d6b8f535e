"""The Python client's batches: over a real NATS, to a real gateway."""

import asyncio
import itertools
import json
from pathlib import Path

import nats.errors
import openai
import pytest

from ryzanstein_client import ApiError
from ryzanstein_client.batch import BatchQueue
from shared.config import CommonSettings
from tests.integration.clients.programs import run
from tests.integration.clients.test_client import example
from tests.integration.gateway.batches.conftest import served
from tests.integration.gateway.batches.helpers import custom_ids, jsonl, line, requests, text_of
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, silence
from tests.processes import nats_variables

__all__ = ["served"]


def queue_of(settings: CommonSettings, **options: object) -> BatchQueue:
    password = settings.nats_password.get_secret_value()
    return BatchQueue(settings.nats_url, settings.nats_user, password, **options)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.jsonl*")}


async def test_a_file_goes_in_and_results_come_out(
    nats_settings: CommonSettings, served: openai.AsyncOpenAI, ring: FakeRing, tmp_path: Path
) -> None:
    ring.behave = saying("Yes.")
    (tmp_path / "input.jsonl").write_bytes(requests(40))
    async with queue_of(nats_settings) as queue:
        batch = await queue.submit(tmp_path / "input.jsonl", window="1h", metadata={"run": "7"})
        assert batch.raw["metadata"] == {"run": "7"}
        seen = [found async for found in queue.watch(batch.id, interval=0.02)]
        assert (seen[-1].status, seen[-1].completed, seen[-1].failed, seen[-1].total) == ("completed", 40, 0, 40)
        assert all(one != other for one, other in itertools.pairwise(seen))
        assert await queue.download(seen[-1], tmp_path / "output.jsonl")
        assert not await queue.download(seen[-1], tmp_path / "errors.jsonl", "errors")
        assert [found.id for found in await queue.newest()] == [batch.id]
    lines = [json.loads(each) for each in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert custom_ids(lines) == sorted(f"c{number}" for number in range(40))
    assert {text_of(each) for each in lines} == {"Yes."}
    assert names(tmp_path) == {"input.jsonl", "output.jsonl"}


async def test_who_begins_again_gets_the_same_batch(
    nats_settings: CommonSettings, served: openai.AsyncOpenAI, ring: FakeRing, tmp_path: Path
) -> None:
    ring.behave = silence
    (tmp_path / "input.jsonl").write_bytes(requests(3))
    async with queue_of(nats_settings) as queue:
        first = await queue.submit(tmp_path / "input.jsonl", idempotency_key="nightly")
    async with queue_of(nats_settings) as queue:
        assert (await queue.submit(tmp_path / "input.jsonl", idempotency_key="nightly")).id == first.id
        assert (await queue.submit(tmp_path / "input.jsonl")).id != first.id
        await queue.cancel(first.id)
        assert (await queue.wait(first.id, interval=0.02)).status == "cancelled"
    async with queue_of(nats_settings, tenant="other") as queue:
        with pytest.raises(ApiError) as caught:
            await queue.status(first.id)
        assert caught.value.status == 404


async def test_what_is_wrong_with_a_file(
    nats_settings: CommonSettings, served: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    (tmp_path / "input.jsonl").write_bytes(jsonl([line("a"), line("a"), line("b", temperature=9)]))
    async with queue_of(nats_settings) as queue:
        batch = await queue.wait((await queue.submit(tmp_path / "input.jsonl")).id, interval=0.02)
        assert batch.status == "failed"
        assert [each.partition(":")[0] for each in batch.errors] == ["line 2", "line 3"]
        with pytest.raises(ApiError) as caught:
            await queue.submit(tmp_path / "input.jsonl", window="soon")
        assert caught.value.status == 400


@pytest.mark.slow
async def test_a_gateway_that_comes_late(
    nats_settings: CommonSettings, served: openai.AsyncOpenAI, gateway: RunningGateway, tmp_path: Path
) -> None:
    """While none is there a question waits; with patience at its end it fails."""
    (tmp_path / "input.jsonl").write_bytes(requests(2))
    async with queue_of(nats_settings) as queue:
        batch = await queue.submit(tmp_path / "input.jsonl")
        gateway.service.end()
        await gateway.task
        async with queue_of(nats_settings, patience=0.1, timeout=0.2) as hasty:
            with pytest.raises((nats.errors.NoRespondersError, nats.errors.TimeoutError)):
                await hasty.status(batch.id)
        waiting = asyncio.create_task(queue.status(batch.id))
        async with run_gateway(nats_settings):
            assert (await asyncio.wait_for(waiting, 60)).id == batch.id


async def test_the_example_of_the_readme(
    nats_settings: CommonSettings, served: openai.AsyncOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.jsonl").write_bytes(requests(5))
    monkeypatch.chdir(tmp_path)
    shown = await run(example("BatchQueue"), "", **nats_variables(nats_settings))
    assert "completed 5 of 5\n[]\n" in shown
    lines = [json.loads(each) for each in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert {each["response"]["body"]["model"] for each in lines} == {MODEL}
