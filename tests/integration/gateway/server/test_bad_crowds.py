"""A thousand of everything that stays open and does nothing: others are served, and memory stays bounded."""

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import psutil
import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.gateway.fake_ring import MODEL, FakeRing
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.raw import Raw, connect

CROWD = 1000
PER_ONE = 64 * 1024  # bytes that one of them may cost the gateway; measured: 19 KiB
IDLE = {"model": MODEL, "prompt": "wait", "stream": True}


@pytest.mark.slow
async def test_crowds_that_do_nothing(bus: Bus, nats_settings: CommonSettings, ring: FakeRing, tmp_path: Path) -> None:
    await ring.stop()  # all wait in the queue, from which nobody takes them
    body = json.dumps(IDLE).encode()
    ask = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with gateway_process(bus, nats_settings, tmp_path, instance="crowded") as gateway:
        process = psutil.Process(gateway.process.process.pid)
        address = str(gateway.http.base_url).removeprefix("http://").rstrip("/")
        await served(gateway.http)
        before, grown = process.memory_info().rss, []
        for streams in (CROWD, 0):
            async with contextlib.AsyncExitStack() as stack:
                crowd = [await stack.enter_async_context(connect(address)) for _ in range(2 * CROWD + streams)]
                for client in crowd[2 * CROWD :]:
                    await client.send(ask)
                await asyncio.gather(*(shake(client) for client in crowd[:CROWD]))
                while streams and await waiting(gateway.http) < streams:
                    await served(gateway.http)
                    assert "generation_failed" not in gateway.process.log.read_text()
                await served(gateway.http)
                grown.append(process.memory_info().rss - before)
        assert grown[0] < 3 * CROWD * PER_ONE, grown
        assert grown[1] < 1.25 * grown[0] + (16 << 20), f"it grows with every crowd: {grown}"
        await served(gateway.http)
        assert "Traceback" not in gateway.process.log.read_text()


async def shake(client: Raw) -> None:
    """Opens a WebSocket."""
    await client.upgrade()
    assert (await client.answer())[0] == 101


async def served(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/models")
    assert [model["id"] for model in answer.json()["data"]] == [MODEL]


async def waiting(http: httpx.AsyncClient) -> int:
    """Generations that the gateway has begun."""
    return int((await http.get("/v1/cluster")).json()["generations_total"])
