"""Each dialect is one line of a list: without it a gateway starts and serves the others, and knows nothing of it."""

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.routing import BaseRoute, WebSocketRoute

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.dialect import Dialect
from services.gateway.api.openapi.operation import ApiRoute, Operation
from services.gateway.auth.authenticator import Authenticator
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.registry import DIALECTS
from services.gateway.lifecycle.request_state import parse, prefix_of
from shared.config import CommonSettings
from shared.service.endpoints import new_registry
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing

HELLO = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}


def routes(dialect: Dialect) -> list[BaseRoute]:
    backend = GatewayBackend(Authenticator(), GatewaySettings(), GatewayMetrics(new_registry()))
    return [route for make in dialect.routes for route in make(backend)]


def operations(dialect: Dialect) -> list[Operation]:
    return [item for route in routes(dialect) if isinstance(route, ApiRoute) for item in route.operations]


def sockets(dialect: Dialect) -> list[str]:
    return [route.path for route in routes(dialect) if isinstance(route, WebSocketRoute)]


@pytest.fixture(params=DIALECTS, ids=lambda dialect: dialect.name)
def removed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Dialect:
    """One that the gateway does not speak."""
    dialect: Dialect = request.param
    rest = tuple(one for one in DIALECTS if one is not dialect)
    monkeypatch.setattr("services.gateway.service.DIALECTS", rest)
    return dialect


@pytest.fixture
async def without(removed: Dialect, nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[httpx.AsyncClient]:
    async with run_gateway(nats_settings) as running, running.http() as client:
        yield client


@pytest.mark.slow
async def test_a_gateway_serves_the_others(without: httpx.AsyncClient, removed: Dialect) -> None:
    chat = "/v1/messages" if removed.name == "openai" else "/v1/chat/completions"
    answer = await without.post(chat, json=HELLO)
    assert answer.status_code == 200, answer.text
    gone = operations(removed)
    for operation in gone:
        path = re.sub(r"\{\w+\}", "x", operation.template)
        told = await without.request(operation.method, path, json={})
        assert told.status_code == 404, f"{operation.route}: {told.text}"
        assert set(told.json()["error"]) == {"message", "type", "param", "code"}
        assert told.json()["error"]["code"] == "unknown_url"
    for path in removed.absent:
        told = await without.post(path, json={})
        assert (told.status_code, told.json()["error"]["code"]) == (404, "unknown_url")
    shown = set((await without.get("/openapi.json")).json()["paths"])
    served = {item.template for one in DIALECTS if one is not removed for item in operations(one)}
    assert shown >= served
    assert not shown & ({item.template for item in gone} - served)

    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "MDEyMzQ1Njc4OTAxMjM0NQ==",
    }
    told = await without.get("/v1/nowhere", headers=upgrade)
    paths = [path for one in DIALECTS if one is not removed for path in sockets(one)]
    assert told.status_code == 404
    assert told.json()["error"]["message"] == f"WebSockets are at {' and '.join(paths)}."


def test_names_and_endpoints_are_of_one_dialect_each() -> None:
    names = [one.name for one in DIALECTS]
    endpoints = [each.name for one in DIALECTS for each in one.endpoints]
    assert len(set(names)) == len(names)
    assert len(set(endpoints)) == len(endpoints)
    for name in endpoints:
        assert parse(prefix_of(name) + "0" * 32) == "0" * 32, f"{name}: no id begins so"
