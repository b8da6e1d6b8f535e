"""What web pages get from a gateway without keys: a foreign one nothing, an allowed one all."""

import json

import httpx
import pytest
import websockets

from shared.config import CommonSettings
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing

PAGE = "https://chat.example"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def test_a_page_that_lets_its_name_point_here_reads_nothing(http: httpx.AsyncClient) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/files"), ("GET", "/"), ("DELETE", "/v1/files/x")):
        answer = await http.request(method, path, headers={"host": "evil.example:8000"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "RYZANSTEIN_ALLOWED_HOSTS" in answer.json()["error"]["message"]
    for path in ("/health", "/ready", "/metrics"):  # load balancers and Prometheus ask by addresses
        assert (await http.get(path, headers={"host": "10.1.2.3:8000"})).status_code == 200


async def test_a_foreign_page_runs_nothing(gateway: RunningGateway, http: httpx.AsyncClient) -> None:
    body = json.dumps(CHAT).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        head = {"content-type": kind, "origin": "https://evil.example"}
        answer = await http.post("/v1/chat/completions", content=body, headers=head)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers
    answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    for origin, address in (("https://evil.example", gateway.url), (gateway.url, "ws://evil.example:1")):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(
                address.replace("http", "ws", 1) + "/v1/stream",
                origin=origin,  # type: ignore[arg-type]
                host="127.0.0.1",
                port=int(gateway.url.rpartition(":")[2]),
                proxy=None,
            )
        assert refused.value.response.status_code == 403
    async with websockets.connect(gateway.websocket_url, origin=gateway.url, proxy=None) as socket:  # type: ignore[arg-type]
        await socket.send('{"type": "ping"}')
        assert json.loads(await socket.recv())["type"] == "pong"


async def test_an_allowed_page_does_all(nats_settings: CommonSettings, ring: FakeRing, keys: Keys) -> None:
    async with run_gateway(nats_settings, allowed_origins=f"{PAGE}, https://b.example") as gateway:
        async with gateway.http(headers={"origin": PAGE}) as http:
            asked = {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,last-event-id",
            }
            preflight = await http.options("/v1/chat/completions", headers=asked)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == PAGE
            assert "last-event-id" in preflight.headers["access-control-allow-headers"]
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == PAGE
            exposed = answer.headers["access-control-expose-headers"]
            assert "x-request-id" in exposed
            assert "x-ryzanstein-generation" in exposed, "by which a page resumes a stream of lines"
        async with websockets.connect(gateway.websocket_url, origin=PAGE, proxy=None):  # type: ignore[arg-type]
            pass
        key = await keys.make("acme")
        await changes_to(gateway, {}, 401)
        async with gateway.http(headers={"origin": PAGE}) as http:
            assert (await http.options("/v1/chat/completions", headers=asked)).status_code == 200
            answer = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        async with gateway.http(headers={"origin": "https://evil.example"}) as http:
            assert (await http.options("/v1/chat/completions", headers=asked)).status_code == 400
