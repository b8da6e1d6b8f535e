"""Every service is replaced, one after another, while clients converse: none of their requests fails, and sessions
that say nothing meanwhile find their KV cache afterwards, in rings that were not there when it was computed."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.executor.rings import BLOCK, MODEL, RING, VOCABULARY, make_served_model
from tests.integration.rollout.cluster_fixture import House

pytestmark = pytest.mark.timeout(400)

LONGEST = 500  # tokens of a prompt, after which a talker begins a new session
PAUSE = 0.5  # seconds that a talker thinks
SERVICES = ("monitor", "scheduler", "gateway", "executor")


class Client:
    """One session. Its next prompt is the last one, and something new."""

    def __init__(self, http: httpx.AsyncClient, urls: list[str], name: str) -> None:
        self._http = http
        self._name = name
        self._random = random.Random(name)
        self._gateways = itertools.cycle(urls)
        self.prompt: list[int] = []
        # Of all turns but the first: tokens found in the cache, and tokens that might have been.
        self.cached = self.reusable = 0

    async def turn(self) -> None:
        reusable = len(self.prompt) // BLOCK * BLOCK
        self.prompt += [self._random.randrange(3, VOCABULARY) for _ in range(24)]
        usage = (await self._answer())["usage"]
        self.reusable += reusable
        self.cached += min(usage["prompt_tokens_details"]["cached_tokens"], reusable)

    async def _answer(self) -> dict[str, dict[str, dict[str, int]]]:
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        async with asyncio.timeout(60):
            while True:
                url = f"{next(self._gateways)}/v1/completions"
                try:
                    answer = await self._http.post(url, json=body, headers={"X-Session-ID": self._name})
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    await asyncio.sleep(0.05)  # a gateway that leaves refuses connections: another one takes it
                    continue
                if answer.status_code == 503 and "The gateway is starting" in answer.text:
                    continue  # where a load balancer, which asks for /ready, sends nobody yet
                assert answer.status_code == 200, answer.text
                return answer.json()


@contextlib.asynccontextmanager
async def talking(http: httpx.AsyncClient, urls: list[str], clients: int) -> AsyncIterator[list[Client]]:
    """Sessions that converse all the time; a failed request fails the test."""
    talked: list[Client] = []
    stopping = asyncio.Event()

    async def talk(number: int) -> None:
        for count in itertools.count():
            client = Client(http, urls, f"talker-{number}-{count}")
            talked.append(client)
            while len(client.prompt) < LONGEST:
                await client.turn()
                if stopping.is_set():
                    return
                await asyncio.sleep(PAUSE)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(talk(number))
        try:
            yield talked
        finally:
            stopping.set()


@pytest.mark.nightly
async def test_a_rolling_update_fails_no_request_and_loses_no_cache(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    model = make_served_model(tmp_path / "model")
    executor = (*RING, "--model", str(model), "--kv-memory", str(64 << 20))
    async with House(bus, nats_settings, tmp_path) as house, httpx.AsyncClient(timeout=60) as http:
        await house.start_two_of_each(executor, MODEL)
        before = {name: process.process.pid for name, process in house.processes.items()}
        urls = house.urls()  # a gateway that is started again has the same
        quiet = [Client(http, urls, f"quiet-{number}") for number in range(12)]
        for _ in range(3):
            await asyncio.gather(*(client.turn() for client in quiet))
        computed = {client: client.cached for client in quiet}
        async with talking(http, urls, clients=3) as talked:
            for service, number in itertools.product(SERVICES, range(2)):
                await house.restart(f"{service}-{number}")
        after = {name: process.process.pid for name, process in house.processes.items()}
        assert not set(before.items()) & set(after.items()), "each is another process"
        for client in quiet:
            client.cached = client.reusable = 0
            await client.turn()
        hits = sum(client.cached for client in quiet) / sum(client.reusable for client in quiet)
        assert hits > 0.95, f"{hits:.1%}"
        assert all(computed.values())
        assert sum(len(client.prompt) for client in talked) > 3 * 24
