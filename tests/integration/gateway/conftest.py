"""A gateway on a real NATS and a real port, with a fake ring behind it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.gateway.service import GatewayService
from shared.config import CommonSettings
from shared.keys import KeyRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.service import endpoints
from tests.integration.gateway.api_keys import Keys
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import FakeRing, until


class RunningGateway:
    """A started gateway and ways to reach it."""

    def __init__(self, service: GatewayService, task: "asyncio.Task[None]") -> None:
        self.service = service
        self.task = task
        self.url = f"http://{service.address}"
        self.websocket_url = f"ws://{service.address}/v1/stream"

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20, **options)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)


@contextlib.asynccontextmanager
async def run_gateway(nats: CommonSettings, **changes: Any) -> AsyncIterator[RunningGateway]:
    """A gateway with some settings changed; stopped at the end."""
    given = {"port": 0, "drain_timeout": 5.0} | changes
    service = GatewayService(GatewayService.settings_type()(**(nats.model_dump() | given)))
    task = asyncio.create_task(service.run())
    await until(lambda: service.state == "ready" or task.done())
    if task.done():
        task.result()
    try:
        yield RunningGateway(service, task)
    finally:
        service.end()
        await task


@pytest.fixture
async def ring(bus: Bus) -> AsyncIterator[FakeRing]:
    """A ring that serves the stub model."""
    fake = FakeRing(bus)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def hosts(bus: Bus) -> FakeHosts:
    """Hosts that have nothing, and a registry without entries."""
    fake = FakeHosts(bus)
    await fake.start()
    return fake


@pytest.fixture
async def gateway(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings) as running:
        yield running


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.http() as client:
        yield client


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.openai() as made:
        yield made


@pytest.fixture
async def claude(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client."""
    url = gateway.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
async def other(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    """A second gateway."""
    async with run_gateway(nats_settings) as running:
        yield running


@pytest.fixture
async def elsewhere(other: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """The second gateway's client."""
    async with other.openai() as made:
        yield made


@pytest.fixture
async def keys(bus: Bus) -> Keys:
    return Keys(await Bucket.open(bus, subjects.KEYS_BUCKET, KeyRecord))


@pytest.fixture(autouse=True)
def fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics of gateways in this process shows what has just happened, though it was asked for before."""
    monkeypatch.setattr(endpoints, "EXPOSITION_SECONDS", 0.0)


# Seconds between two looks, of which nobody hears but by waiting for the next one.
POLLS = (
    "api.grpc.server.SWEEP",
    "api.models.routes.LOOK",
    "auth.authenticator.LOOK",
    "batches.line_runner.LOOK",
    "core.cold_starts.INTERVAL",
    "jobs.runners.TICK",
    "lifecycle.failover.PAUSE",
    "training.runner.BROKER_PAUSE",
    "training.service.LOOK",
    "training.tokenization.BUSY_PAUSE",
)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gateways in this process."""
    for name in POLLS:
        monkeypatch.setattr(f"services.gateway.{name}", 0.1)


@pytest.fixture
async def no_trace(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Whatever a client does, no stack trace is in the log, ours or a library's."""
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
