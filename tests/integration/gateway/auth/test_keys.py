"""API keys on a real NATS: who is let in, what a tenant sees, and how soon a revoked key is refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from services.gateway.core.settings import GatewaySettings
from services.gateway.service import GatewayService
from shared.config import CommonSettings
from shared.messages.records import Idempotency
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.api_keys import Keys, bearer, changes_to, status
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, until
from tests.integration.gateway.resuming import Paced, public_id, read_events
from tests.processes import service_process

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def two(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[list[RunningGateway]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_gateway(nats_settings)) for _ in range(2)]


async def test_the_first_key_closes_every_gateway_and_a_revoked_one_opens_none(
    two: list[RunningGateway], keys: Keys
) -> None:
    for gateway in two:
        assert await status(gateway, {"Authorization": "Bearer none"}) == 200
    first, second = await keys.make("acme"), await keys.make("acme")
    for gateway in two:
        await changes_to(gateway, {}, 401)
        await changes_to(gateway, bearer(second), 200)
        assert await status(gateway, bearer(first)) == 200
        assert await status(gateway, {"x-api-key": first.token}) == 200
        for path in ("/health", "/ready", "/metrics"):
            assert await status(gateway, {}, path) == 200
        for path in ("/v1/nothing", "/v1/generations/x", "/v1/cluster", "/nothing"):
            assert await status(gateway, {}, path) == 401
        for path in ("/", "/docs", "/openapi.json", "/console/app/console.js"):
            assert await status(gateway, {}, path) == 200
    await keys.revoke(first)
    await keys.revoke(second)
    for gateway in two:
        for key in (first, second):
            await changes_to(gateway, bearer(key), 401)
        assert await status(gateway, {}) == 401


async def test_the_refusal_is_openais(gateway: RunningGateway, keys: Keys) -> None:
    key = await keys.make("acme")
    await changes_to(gateway, {}, 401)
    wrong = key.token[:-3] + "abc"
    async with gateway.http() as http:
        refused = await http.post(CHAT, json=BODY, headers={"Authorization": f"Bearer {wrong}"})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == 'Bearer realm="ryzanstein"'
    error = refused.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
    assert error["message"].startswith("Incorrect API key provided")
    assert wrong[16:] not in refused.text


async def test_metrics_can_be_closed(nats_settings: CommonSettings, ring: FakeRing, keys: Keys) -> None:
    key = await keys.make("acme")
    async with run_gateway(nats_settings, metrics_need_key=True) as gateway:
        assert await status(gateway, {}, "/metrics") == 401
        assert await status(gateway, bearer(key), "/metrics") == 200
        assert await status(gateway, {}, "/health") == 200


async def test_a_gateway_that_never_saw_the_keys_answers_nobody() -> None:
    settings = GatewaySettings(port=0, nats_url="nats://127.0.0.1:9", nats_connect_timeout=60)
    service = GatewayService(settings)
    task = asyncio.create_task(service.run())
    await until(lambda: service.address)
    async with httpx.AsyncClient(base_url=f"http://{service.address}") as http:
        await until(lambda: service.address)
        for path, expected in (("/health", 200), ("/ready", 503), ("/v1/models", 503), ("/v1/x", 503)):
            assert (await http.get(path)).status_code == expected
        assert (await http.post(CHAT, json=BODY)).status_code == 503
    service.end()
    await task


async def test_tenants_do_not_see_each_others_generations(
    two: list[RunningGateway], ring: FakeRing, keys: Keys
) -> None:
    """Neither at the gateway that has the generation, nor at one that finds it by its record."""
    ring.behave = paced = Paced(b"Mine, and mine alone.", 10)
    mine, theirs, colleague = await keys.make("acme"), await keys.make("other"), await keys.make("acme")
    for gateway in two:
        await changes_to(gateway, bearer(colleague), 200)
    async with two[0].http(headers=bearer(mine)) as http:
        body = BODY | {"stream": True}
        async with http.stream("POST", CHAT, json=body) as response:
            identity = public_id(await read_events(response, 4))
            assert [request.tenant for request in ring.requests] == ["acme"]
            for gateway in two:
                path = f"/v1/generations/{identity}"
                for method, url in (("GET", path), ("DELETE", path), ("GET", path + "/stream")):
                    async with gateway.http(headers=bearer(theirs)) as stranger:
                        refused = await stranger.request(method, url)
                        assert refused.status_code == 404, (method, url)
                        unknown = await stranger.request(method, url.replace(identity, f"chatcmpl-{'0' * 32}"))
                        assert unknown.json()["error"]["code"] == refused.json()["error"]["code"]
                socket_url = gateway.websocket_url
                async with connect(socket_url, additional_headers=bearer(theirs)) as socket:
                    await socket.send(json.dumps({"type": "attach", "id": "a", "generation": identity}))
                    answer = json.loads(await socket.recv())
                    assert answer["error"]["code"] == "generation_not_found"
                assert await status(gateway, bearer(colleague), path) == 200
            state = (await http.get(f"/v1/generations/{identity}")).json()
            assert state["status"] == "in_progress"
            shown = {}
            for key in (mine, colleague, theirs):
                async with two[0].http(headers=bearer(key)) as client:
                    shown[key.identity] = (await client.get("/v1/cluster")).json()["generations"]
            assert [len(some) for some in shown.values()] == [1, 1, 0]
            paced.allow()


async def test_what_is_stored_is_its_tenants_and_tokenizing_needs_a_key(
    http: httpx.AsyncClient, gateway: RunningGateway, keys: Keys
) -> None:
    one, other = await keys.make("one"), await keys.make("other")
    await changes_to(gateway, {}, 401)
    await changes_to(gateway, bearer(one), 200)
    await changes_to(gateway, bearer(other), 200)
    made = await http.post("/v1/chat/completions", json=BODY | {"store": True}, headers=bearer(one))
    url = f"/v1/chat/completions/{made.json()['id']}"
    assert (await http.get(url, headers=bearer(one))).status_code == 200
    assert (await http.get(url, headers=bearer(other))).status_code == 404
    for path in ("/tokenize", "/v1/detokenize", "/v1/embeddings"):
        assert (await http.post(path, json={})).status_code == 401


async def test_tenants_do_not_see_each_others_responses(two: list[RunningGateway], ring: FakeRing, keys: Keys) -> None:
    """Whether they are read, cancelled, deleted or gone on with, at either gateway."""
    mine, theirs, colleague = await keys.make("acme"), await keys.make("other"), await keys.make("acme")
    for gateway in two:
        await changes_to(gateway, bearer(colleague), 200)
    request = {"model": MODEL, "input": "Hello."}
    async with two[0].http(headers=bearer(mine)) as http:
        made = (await http.post("/v1/responses", json=request)).json()
    path = f"/v1/responses/{made['id']}"
    for gateway in two:
        async with gateway.http(headers=bearer(theirs)) as stranger:
            for method, url in (
                ("GET", path),
                ("DELETE", path),
                ("POST", f"{path}/cancel"),
                ("GET", f"{path}/input_items"),
            ):
                refused = await stranger.request(method, url)
                assert refused.status_code == 404, (method, url)
                assert refused.json()["error"]["code"] == "response_not_found"
            further = request | {"previous_response_id": made["id"]}
            refused = await stranger.post("/v1/responses", json=further)
            assert refused.json()["error"]["code"] == "previous_response_not_found"
        async with gateway.http(headers=bearer(colleague)) as http:
            assert (await http.get(path)).json() == made
            answer = (await http.post("/v1/responses", json=further)).json()
            assert answer["previous_response_id"] == made["id"]


async def test_idempotency_keys_are_each_tenants_own(gateway: RunningGateway, keys: Keys) -> None:
    mine, theirs, colleague = await keys.make("acme"), await keys.make("other"), await keys.make("acme")
    await changes_to(gateway, bearer(colleague), 200)
    await changes_to(gateway, {}, 401)
    ids = []
    async with gateway.http() as http:
        for key in (mine, theirs, colleague):
            headers = bearer(key) | {"Idempotency-Key": "k"}
            ids.append((await http.post(CHAT, json=BODY, headers=headers)).json()["id"])
    assert ids[0] == ids[2] != ids[1]
    entries = await Bucket.open(keys.bucket._bus, subjects.IDEMPOTENCY_BUCKET, Idempotency)
    for name in await entries.items():
        assert len(name) == 32
        assert not any(key.token in name for key in (mine, theirs, colleague))


async def test_an_open_websocket_begins_nothing_more_once_its_key_is_revoked(
    gateway: RunningGateway, ring: FakeRing, keys: Keys
) -> None:
    key = await keys.make("acme")
    await changes_to(gateway, bearer(key), 200)
    await changes_to(gateway, {}, 401)
    with pytest.raises(InvalidStatus) as refused:
        await connect(gateway.websocket_url)
    assert refused.value.response.status_code == 401
    async with connect(gateway.websocket_url, additional_headers=bearer(key)) as socket:
        await socket.send(json.dumps({"type": "generate", "id": "a", "request": BODY}))
        while json.loads(await socket.recv())["type"] != "done":
            pass
        await keys.revoke(key)
        await changes_to(gateway, bearer(key), 401)
        for message in (
            {"type": "generate", "id": "b", "request": BODY},
            {"type": "attach", "id": "c", "generation": f"chatcmpl-{'0' * 32}"},
        ):
            await socket.send(json.dumps(message))
            answer = json.loads(await socket.recv())
            assert (answer["id"], answer["error"]["code"]) == (message["id"], "invalid_api_key")
    assert len(ring.requests) == 1


async def test_no_log_and_no_error_shows_a_key(
    bus: Bus, nats_settings: CommonSettings, keys: Keys, tmp_path: Path
) -> None:
    key = await keys.make("acme")
    secret = key.token.split("-", 2)[2]
    options = ("--port", "0", "--log-level", "debug", "--log-format", "json")
    async with service_process(
        bus, nats_settings, "services.gateway", tmp_path, *options, instance="logging"
    ) as gateway:
        beat = await gateway.wait_ready()
        async with httpx.AsyncClient(base_url=f"http://{beat.address}", headers=bearer(key)) as http:
            for path in (f"/v1/{key.token}", f"/v1/models/{key.token}", f"/v1/generations/{key.token}"):
                answer = await http.get(path)
                assert answer.status_code == 404
                assert secret not in answer.text
            answer = await http.post(CHAT, json=BODY | {"model": key.token})
            assert secret not in answer.text
        await gateway.end()
    logged = gateway.log.read_text()
    assert f"rz-{key.identity}-***" in logged
    assert secret not in logged


@pytest.mark.parametrize("isolated", [False, True])
async def test_sessions_are_each_tenants_own_and_kv_cache_where_it_is_set(
    nats_settings: CommonSettings, ring: FakeRing, keys: Keys, isolated: bool
) -> None:
    async with run_gateway(nats_settings, isolate_tenant_cache=isolated) as gateway, gateway.http() as http:
        tenants = [bearer(await keys.make(name)) for name in ("acme", "other")]
        for headers in tenants:
            await changes_to(gateway, headers, 200)
        await changes_to(gateway, {}, 401)
        for headers in tenants:
            await http.post(CHAT, json=BODY, headers=headers)
            await http.post(CHAT, json=BODY | {"prompt_cache_key": "mine"}, headers=headers)
            await http.post(CHAT, json=BODY, headers=headers | {"X-Session-ID": "mine"})
            await http.post(CHAT, json=BODY, headers=headers | {"X-Session-ID": "mine"})
    acme, other = ring.requests[:4], ring.requests[4:]
    assert [request.prompt for request in acme] == [request.prompt for request in other]
    for requests in (acme, other):
        assert len({request.session for request in requests}) == 3
        assert len({request.cache_salt for request in requests}) == 1
    assert not {request.session for request in acme} & {request.session for request in other}
    assert (acme[0].cache_salt != other[0].cache_salt) == isolated == bool(acme[0].cache_salt)


async def warns_when_it_starts(nats: CommonSettings, **settings: Any) -> bool:
    with capture_logs() as logs:
        async with run_gateway(nats, **settings):
            pass
    warnings = [line for line in logs if line["event"] == "open_to_the_network"]
    assert all("ryzanstein keys create" in line["advice"] for line in warnings)
    return len(warnings) == 1


async def test_who_serves_the_network_without_keys_is_warned(nats_settings: CommonSettings, keys: Keys) -> None:
    everywhere = "0.0.0.0"
    assert await warns_when_it_starts(nats_settings, host=everywhere)
    assert not await warns_when_it_starts(nats_settings, host="127.0.0.1")
    assert not await warns_when_it_starts(nats_settings, host=everywhere, require_key=True)
    await keys.make("acme")
    assert not await warns_when_it_starts(nats_settings, host=everywhere)
