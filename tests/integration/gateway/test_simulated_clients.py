"""The simulation's clients at real gateways, on an ordinary loop: what they see is what they wait for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from services.executor.worker.stub import stub_token
from shared.messages import GenerationRequest
from tests.integration.gateway.batches.helpers import ready
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing
from tests.simulation.clients import tenants
from tests.simulation.clients.client import Plan
from tests.simulation.clients.crowd import KINDS, Crowd
from tests.simulation.core.asgi import AsgiServer

SHORT = Plan(requests=2, pause=(0.0, 0.01), tokens=(1, 30), prompt=(5, 20), size=(1, 4), wait=(0.0, 0.1))
NEED_MORE = ("training", "models", "flooding")  # whose work a ring alone does not do, or one of 2,048 tokens


async def stub(ring: FakeRing, request: GenerationRequest) -> None:
    """Answers as the stub engine does."""
    for position in range(len(request.generated), request.max_tokens):
        await ring.emit(request, position, [stub_token(request.sampling.seed, position)])
    await ring.emit(request, request.max_tokens, [], finish="length")


@contextlib.asynccontextmanager
async def listening(*gateways: RunningGateway) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [AsgiServer(one.service.make_app(), "127.0.0.1", 0) for one in gateways]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        yield [server.address for server in servers]


@pytest.mark.slow
async def test_clients_of_every_kind_are_answered(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "HELD", (0.0, 0.1))
    ring.behave = stub
    await ready(ring)
    mains = []
    async with listening(gateway, other) as addresses:
        crowd = Crowd(7, lambda: addresses, lambda name, main: mains.append(main()), MODEL)
        for kind in KINDS:
            if kind not in NEED_MORE:
                crowd.add(kind, SHORT)
        crowd.start()
        async with asyncio.timeout(60):
            await asyncio.gather(*mains)
        history = crowd.history
        assert (history.faults, history.unsettled) == ([], [])
        assert [request.fault for request in history.requests if request.fault] == []
        for request in history.requests:
            assert request.outcome != "answered" or request.wanted.text in (None, request.text)
        assert history.batches
        for batch in history.batches:
            assert batch.status in batch.ends or (batch.status == "cancelled" and batch.cancel_asked), batch
        assert {request.kind for request in history.requests} > {"stream", "websocket", "grpc", "response"}

        audited = asyncio.Event()
        await crowd.auditor(audited.set)()
        assert audited.is_set()
        for known in history.acknowledged:
            assert known.found == (200 if known.gone_at < 0 else 404), known


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    crowd = Crowd(7, list, lambda name, main: None)
    with pytest.raises(ValueError, match=r"there are no clients 'striem'; known are batches, cancelling"):
        crowd.add("striem")
