"""Several gateways on one port: the system divides connections among them, and each is like the other."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.server.connections import ConnectionLimiter
from shared.config import CommonSettings
from shared.errors import PortInUse
from shared.service.listener import reserve
from tests.integration.gateway.api_keys import Keys, bearer
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, until
from tests.integration.gateway.lifecycle.test_drain import BODY, Held
from tests.integration.gateway.resuming import Paced, public_id, resumed, streamed, text_of
from tests.integration.gateway.server.test_tls import Files, files  # noqa: F401  # a fixture
from tests.integration.gateway.streams.test_resume import CHAT, STREAM, TEXT


class Shared:
    """Gateways on one port, each with an ops port."""

    def __init__(self, ones: list[RunningGateway], ops: list[str], trust: ssl.SSLContext | None) -> None:
        self.ones = ones
        self.ops = ops
        self.trust = trust

    @property
    def url(self) -> str:
        return f"{'https' if self.trust else 'http'}://{self.ones[0].service.address}"

    def http(self, url: str = "") -> httpx.AsyncClient:
        """A client with one connection."""
        limits = httpx.Limits(max_connections=1)
        return httpx.AsyncClient(
            base_url=url or self.url, timeout=20, limits=limits, verify=self.trust or True, trust_env=False
        )

    @contextlib.asynccontextmanager
    async def connected_to(self, number: int) -> AsyncIterator[httpx.AsyncClient]:
        """A client whose one connection the system gave to that gateway."""
        wanted = self.ones[number].service.instance
        for _ in range(1000):
            async with self.http() as client:
                if (await client.get("/health")).json()["instance"] == wanted:
                    yield client
                    return
        raise AssertionError("the system gave it none of 1000 connections")


@contextlib.asynccontextmanager
async def sharing(
    nats: CommonSettings, count: int = 2, trust: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[Shared]:
    async with contextlib.AsyncExitStack() as stack:
        ones: list[RunningGateway] = []
        kept = [stack.enter_context(reserve("127.0.0.1", 0)) for _ in range(count)]
        port = stack.enter_context(reserve("127.0.0.1", 0, shared=True)).getsockname()[1]
        for each in kept:
            ops_port = each.getsockname()[1]
            ones.append(
                await stack.enter_async_context(
                    run_gateway(nats, port=port, share_port=True, ops_port=ops_port, **options)
                )
            )
        scheme = "https" if trust else "http"
        yield Shared(ones, [f"{scheme}://127.0.0.1:{each.getsockname()[1]}" for each in kept], trust)


async def test_a_stream_begun_at_one_goes_on_at_the_other(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    async with sharing(nats_settings) as shared:
        async with shared.connected_to(0) as one:
            first = await streamed(one, CHAT, STREAM, 5)
        paced.allow()
        async with shared.connected_to(1) as other:
            rest = await resumed(other, public_id(first), first[-1][1])
    assert text_of(first) + text_of(rest) == TEXT.decode()
    assert len(ring.requests) == 1


async def test_a_repeat_at_the_other_attaches_to_the_same_generation(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    answers = []
    async with sharing(nats_settings) as shared:
        for number in (0, 1):
            async with shared.connected_to(number) as http:
                answers.append(await http.post("/v1/completions", json=BODY, headers={"idempotency-key": "k"}))
    assert answers[0].json() == answers[1].json()
    assert len(ring.requests) == 1


async def test_a_limit_holds_for_both_together(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with sharing(nats_settings, requests_per_minute=2) as shared:
        statuses = []
        for number in (0, 1, 0, 1):
            async with shared.connected_to(number) as http:
                statuses.append((await http.post("/v1/completions", json=BODY)).status_code)
    assert statuses == [200, 200, 429, 429]


async def test_each_answers_for_itself_on_a_port_of_its_own(
    nats_settings: CommonSettings, ring: FakeRing, keys: Keys
) -> None:
    key = await keys.make("acme")
    async with sharing(nats_settings, metrics_need_key=True) as shared:
        for one, url in zip(shared.ones, shared.ops, strict=True):
            async with shared.http(url) as http:
                assert (await http.get("/ready")).json()["instance"] == one.service.instance
                assert (await http.get("/v1/models")).status_code == 404
                assert (await http.get("/metrics")).status_code == 401
                found = await http.get("/metrics", headers=bearer(key))
                assert "ryzanstein_service_ready 1.0" in found.text
                assert 'ryzanstein_gateway_connections{port="http"} 1.0' in found.text


async def test_who_leaves_loses_no_connection_and_is_asked_alone_to_its_end(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    held = ring.behave = Held()
    async with sharing(nats_settings) as shared, shared.http(shared.ops[0]) as ops:
        leaving, staying = (one.service for one in shared.ones)
        async with (
            shared.connected_to(0) as busy,
            busy.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
        ):
            await asyncio.wait_for(held.begun.wait(), 10)
            leaving.end()
            await until(lambda: leaving.state == "draining")
            seen = set()
            while len(seen) < 2 and not leaving._backend._draining:
                async with shared.http() as http:
                    seen.add((await http.get("/health")).json()["instance"])
            for _ in range(50):
                async with shared.http() as http:
                    assert (await http.get("/health")).json()["instance"] == staying.instance
            told = await ops.get("/ready")
            assert (told.status_code, told.json()["state"]) == (503, "draining")
            held.go_on.set()
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def test_tls_and_grpc_are_shared_too(
    nats_settings: CommonSettings,
    ring: FakeRing,
    files: Files,  # noqa: F811
) -> None:
    certificate, key = files.issue("gateway")
    trust = ssl.create_default_context(cafile=files.ca)
    with reserve("127.0.0.1", 0, shared=True) as kept:
        grpc_port = kept.getsockname()[1]
        options = {"tls_certificate": certificate, "tls_key": key, "grpc_port": grpc_port}
        async with sharing(nats_settings, trust=trust, **options) as shared:
            for number, url in enumerate(shared.ops):
                async with shared.connected_to(number) as http, shared.http(url) as ops:
                    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
                    assert (await ops.get("/ready")).status_code == 200
            doors: list[ConnectionLimiter] = [one.service._door for one in shared.ones]
            context = ssl.create_default_context(cafile=files.ca)
            context.set_alpn_protocols(["h2"])
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(30):
                    while not all(door.count("grpc") for door in doors):
                        _, writer = await asyncio.open_connection("127.0.0.1", grpc_port, ssl=context)
                        stack.callback(writer.close)


@pytest.mark.parametrize("option", ["port", "grpc_port", "ops_port"])
async def test_a_port_of_a_program_that_does_not_share_it_is_named(
    nats_settings: CommonSettings, ring: FakeRing, option: str
) -> None:
    with reserve("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port} on 127.0.0.1 is taken"):
            async with run_gateway(nats_settings, share_port=True, **{option: port}):
                pass
