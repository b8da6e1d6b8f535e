"""The whole house with a NATS user per service: everything that it does works, and nothing that it does is refused."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.cli.commands.batch import RequestedBatch, by_nats
from services.cli.commands.control import drain_group
from services.cli.commands.status import read_status
from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings
from shared.keys import KeyRecord, new_key
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.permissions import User
from tests.integration.rollout.cluster_fixture import House, Load

LONG = {"model": "stub", "prompt": "x", "max_tokens": 400, "stream": True}


class HouseOfUsers(House):
    """Each service logs in as itself."""

    def __init__(self, bus: Bus, server: LocalNats, directory: Path) -> None:
        super().__init__(bus, settings_of(server, "operator"), directory)
        self._server = server

    def settings_of(self, module: str) -> CommonSettings:
        user: User = module.rpartition(".")[2].replace("_", "-")  # type: ignore[assignment]
        return settings_of(self._server, user)


def settings_of(server: LocalNats, user: User) -> CommonSettings:
    return server.settings(user, beat_interval=0.1)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LocalNats]:
    made = LocalNats(tmp_path / "nats", least_rights=True)
    await made.start()
    yield made
    await made.stop()


async def begin(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> str:
    """Begins a long answer and leaves it; returns its id."""
    async with http.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return line.partition('"id":"')[2].partition('"')[0]
    raise AssertionError("the stream had no event")


async def state(http: httpx.AsyncClient, url: str, identity: str) -> str:
    answer = await http.get(f"{url}/v1/generations/{identity}")
    return answer.json()["status"] if answer.status_code == 200 else answer.text


async def until_stated(http: httpx.AsyncClient, url: str, identity: str, wanted: str) -> None:
    async with asyncio.timeout(30):
        while (now := await state(http, url, identity)) != wanted:
            assert now in ("in_progress", "queued"), now


async def submit_a_batch(settings: CommonSettings, directory: Path) -> None:
    """Two lines through the queue, to their output file."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions"}
        | {"body": {"model": "stub", "prompt": name, "max_tokens": 3}}
        for name in "ab"
    ]
    path = directory / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with by_nats(settings) as client:
        batch = await client.submit(RequestedBatch(path, "/v1/completions", "24h", None))
        async with asyncio.timeout(60):
            while batch["status"] != "completed":
                assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
                batch = await client.get(batch["id"])
        text = b"".join([part async for part in client.content(batch, "output")])
    assert {json.loads(line)["custom_id"] for line in text.splitlines()} == {"a", "b"}


@pytest.mark.slow
async def test_everything_works_with_the_least_rights(server: LocalNats, tmp_path: Path) -> None:
    operator = settings_of(server, "operator")
    bus = await Bus.connect(operator, "test")
    async with HouseOfUsers(bus, server, tmp_path) as house, httpx.AsyncClient(timeout=60) as http:
        await house.start_two_of_each()
        first, second = house.urls()
        async with Load(house.urls(), clients=4).running() as load:
            house.kill("executor-0")  # failover
            await load.more(8)
            await house.processes["executor-0"].process.wait()
            await house.start("executor-0-again", "services.executor", *house._kinds["executor-0"][1])
            house.kill("scheduler-0")
            await load.more(8)
        await submit_a_batch(operator, tmp_path)
        await submit_a_batch(settings_of(server, "batch"), tmp_path)
        status = await read_status(operator)
        assert {group.group for group in status.status.groups} == {"group-0", "group-1"}

        asked = {"model": "stub", "input": "Hi", "max_output_tokens": 16}
        response = (await http.post(f"{first}/v1/responses", json=asked)).json()
        kept = f"{second}/v1/responses/{response['id']}"
        assert (await http.get(kept)).json()["output"] == response["output"]
        assert (await http.delete(kept)).json()["deleted"]

        keep = {"Idempotency-Key": "k", "X-Ryzanstein-Background": "60", "X-Session-ID": "s"}
        read_here, inherited = (
            await begin(http, first, keep),
            await begin(http, first, keep | {"Idempotency-Key": "l"}),
        )
        assert await state(http, second, read_here) == "in_progress"  # asks the first gateway to go on
        deleted = await http.delete(f"{second}/v1/generations/{read_here}")
        assert deleted.json()["cancelled"]
        await until_stated(http, second, read_here, "cancelled")
        house.kill("gateway-0")  # its generations are inherited
        left, _ = await drain_group(operator, "group-1", grace=0.0, wait=True, timeout=30, report=lambda record: None)
        assert left
        await until_stated(http, second, inherited, "completed")

        key = new_key("acme", time.time())
        await (await Bucket.open(bus, subjects.KEYS_BUCKET, KeyRecord)).put(key.identity, key.record)
        async with asyncio.timeout(10):
            while (await http.get(f"{second}/v1/models")).status_code != 401:
                pass
        answer = await http.get(f"{second}/v1/models", headers={"Authorization": f"Bearer {key.token}"})
        assert answer.json()["data"][0]["id"] == "stub"
    await bus.close()
    refused = [line for line in server.log.read_text().splitlines() if "Violation" in line]
    assert not refused, "\n".join(refused)
