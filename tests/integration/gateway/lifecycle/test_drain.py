"""A gateway that is told to stop: no new connections, and every answer that has begun ends."""

import asyncio
import json
import socket

import httpx
import pytest
import websockets

from services.gateway.service import GatewayService
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, until

BODY = {"model": "org/stub-model", "prompt": "x", "max_tokens": 3}


class Held:
    """A ring's behaviour: the first token at once, the others when they are let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, ring: FakeRing, request: GenerationRequest) -> None:
        await ring.emit(request, 0, [72])
        self.begun.set()
        await self.go_on.wait()
        await ring.emit(request, 1, [105, 33], finish="length")


async def until_refused(gateway: RunningGateway) -> None:
    """Returns when new connections are refused, and idle ones closed."""
    async with asyncio.timeout(10):
        while True:
            async with gateway.http() as http:
                try:
                    await http.get("/health")
                except httpx.ConnectError:
                    break
                except httpx.ReadError:  # it waited to be accepted
                    continue
        await until(lambda: gateway.service._backend._draining)


async def test_new_connections_are_refused_and_streams_end(gateway: RunningGateway, ring: FakeRing) -> None:
    held = ring.behave = Held()
    async with gateway.http() as busy, gateway.http() as idle:
        assert (await idle.get("/ready")).status_code == 200
        async with busy.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            await asyncio.wait_for(held.begun.wait(), 10)
            gateway.service.end()
            await until(lambda: gateway.service.state == "draining")
            await until_refused(gateway)
            with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError)):  # an idle connection was closed
                await idle.get("/ready")
            held.go_on.set()
            text = (await answer.aread()).decode()
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hi!"
    assert text.endswith("data: [DONE]\n\n")
    await asyncio.wait_for(gateway.task, 10)


async def test_what_came_before_the_port_was_closed_is_answered(gateway: RunningGateway) -> None:
    """It lies in the system's queue when the gateway is told to stop: no client can know better by then."""
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, _, port = gateway.service.address.rpartition(":")
    address = (host, int(port))
    connections = []
    for _ in range(20):
        connection = socket.create_connection(address)  # the loop stands still meanwhile
        connection.sendall(head + body)
        connection.setblocking(False)
        connections.append(connection)
    gateway.service.end()
    for connection in connections:
        reader, writer = await asyncio.open_connection(sock=connection)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        writer.close()
    await asyncio.wait_for(gateway.task, 20)


async def test_a_websocket_keeps_its_generations_and_gets_no_new_ones(gateway: RunningGateway, ring: FakeRing) -> None:
    held = ring.behave = Held()
    async with websockets.connect(gateway.websocket_url, proxy=None) as connection:
        await connection.send(json.dumps({"type": "generate", "id": "a", "endpoint": "completions", "request": BODY}))
        await asyncio.wait_for(held.begun.wait(), 10)
        gateway.service.end()
        await until_refused(gateway)
        await connection.send(json.dumps({"type": "generate", "id": "b", "endpoint": "completions", "request": BODY}))
        last = {}
        async for message in connection:
            said = json.loads(message)
            last[said["id"]] = said
            if said["id"] == "b":
                held.go_on.set()
            if said["id"] == "a" and said["type"] == "done":
                break
    assert last["a"]["type"] == "done"
    assert (last["b"]["type"], last["b"]["error"]["code"]) == ("error", "unavailable")
    await asyncio.wait_for(gateway.task, 10)


async def test_with_a_delay_it_says_that_it_is_not_ready_and_serves(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    async with run_gateway(nats_settings, drain_delay=1.0) as gateway, gateway.http() as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        gateway.service.end()
        await until(lambda: gateway.service.state == "draining")
        ready = await http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "the service is draining"
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await asyncio.wait_for(gateway.task, 20)
    assert isinstance(gateway.service, GatewayService)
