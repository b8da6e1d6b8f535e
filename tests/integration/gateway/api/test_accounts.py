"""What is counted of a request: its status is what became of it, also when its stream had begun as a success."""

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets

from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, failing, silence, until

pytestmark = pytest.mark.usefixtures("no_trace")

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 8}
fail_in_the_middle = failing("unavailable", "It broke.", behind=b"A")


async def counted(http: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    """Requests by route, model and status."""
    found = {}
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("ryzanstein_gateway_requests_total{"):
            labels, number = line.partition("{")[2].split("} ")
            by = dict(part.split("=", 1) for part in labels.split(","))
            found[tuple(by[name].strip('"') for name in ("route", "model", "status"))] = float(number)
    return found  # type: ignore[return-value]


async def test_a_stream_that_breaks_is_no_success(http: httpx.AsyncClient, ring: FakeRing) -> None:
    ring.behave = fail_in_the_middle
    answer = await http.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.status_code == 200, "it had begun"
    assert "It broke." in answer.text
    assert await counted(http) == {("/v1/completions", MODEL, "503"): 1}


async def test_generations_over_websocket_are_requests(
    gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing
) -> None:
    async with websockets.connect(gateway.websocket_url) as socket:

        async def generate(name: str) -> dict[str, Any]:
            message = {"type": "generate", "id": name, "endpoint": "completions", "request": BODY}
            await socket.send(json.dumps(message))
            while (last := json.loads(await socket.recv()))["type"] == "chunk":
                pass
            assert isinstance(last, dict)
            return last

        assert (await generate("a"))["type"] == "done"
        ring.behave = fail_in_the_middle
        assert (await generate("b"))["type"] == "error"
        ring.behave = silence
        waiting = asyncio.create_task(generate("c"))
        await until(lambda: len(ring.requests) == 3)
        await socket.send(json.dumps({"type": "cancel", "id": "c"}))
        assert (await waiting)["cancelled"] is True
    found = await counted(http)
    route = "/v1/stream"
    assert found == {(route, MODEL, "200"): 1, (route, MODEL, "503"): 1, (route, MODEL, "499"): 1}
