"""What a gateway tells Prometheus: how requests ended, how long that took, and no series for what is made up."""

from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.core.settings import GatewaySettings
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, until

COMPLETIONS = "/v1/completions"


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 64, **fields}


async def samples(http: httpx.AsyncClient) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def value(http: httpx.AsyncClient, name: str, **labels: str) -> float:
    return (await samples(http))[name, frozenset(labels.items())]


class Asgi:
    """The gateway's application without a connection: ten thousand requests in a few seconds."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._app = gateway.service.make_app()

    async def status(self, path: str, content: bytes, method: str = "POST") -> int:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))],
        }
        sent: list[Any] = []

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return int(sent[0]["status"])


@pytest.mark.slow
async def test_what_clients_make_up_makes_no_series(gateway: RunningGateway, http: httpx.AsyncClient) -> None:
    assert (await http.post(COMPLETIONS, json=body(model="made-up"))).status_code == 404
    assert (await http.post("/v1/made-up")).status_code == 404
    assert (await http.get("/v1/models/made-up")).status_code == 404
    before = set(await samples(http))
    asgi = Asgi(gateway)
    for number in range(500):
        content = msgspec.json.encode(body(model=f"made-up-{number}"))
        assert await asgi.status(COMPLETIONS, content) == 404
    for number in range(200):
        assert await asgi.status(f"/v1/made-up-{number}", b"") == 404
        assert await asgi.status(f"/v1/models/made-up-{number}", b"", "GET") == 404
    assert set(await samples(http)) == before


async def test_ends_are_counted_by_their_reason(http: httpx.AsyncClient, ring: FakeRing) -> None:
    async def behave(fake: FakeRing, request: GenerationRequest) -> None:
        prompt = bytes(request.prompt)
        if b"hang" in prompt:
            await fake.emit(request, 0, list(b"a"))
        elif b"fail" in prompt:
            await fake.emit(request, 0, [], finish="error", error=("internal_error", "broken", False))
        else:
            await fake.emit(request, 0, list(b"ab"), finish="length" if b"long" in prompt else "stop")

    ring.behave = behave
    for prompt, status in (("long", 200), ("short", 200), ("fail", 500)):
        assert (await http.post(COMPLETIONS, json=body(prompt=prompt))).status_code == status
    async with http.stream("POST", COMPLETIONS, json=body(prompt="hang", stream=True)) as response:
        async for _ in response.aiter_lines():
            break
    ended = "ryzanstein_gateway_generations_total"
    await until(lambda: value(http, ended, model=MODEL, reason="abort"))
    for reason in ("length", "stop", "error", "abort"):
        assert await value(http, ended, model=MODEL, reason=reason) == 1, reason
        assert await value(http, "vllm:request_success_total", model_name=MODEL, finished_reason=reason) == 1
    assert await value(http, "ryzanstein_gateway_generation_seconds_count", model=MODEL) == 2
    assert await value(http, "vllm:e2e_request_latency_seconds_count", model_name=MODEL) == 2


async def test_delivery_is_measured_for_streams(http: httpx.AsyncClient) -> None:
    delivered = "ryzanstein_gateway_delivery_seconds_count"
    await http.post(COMPLETIONS, json=body())
    assert await value(http, delivered, model=MODEL) == 0
    streamed = (await http.post(COMPLETIONS, json=body(stream=True))).text
    assert streamed.endswith("data: [DONE]\n\n")
    await until(lambda: value(http, delivered, model=MODEL))
    assert await value(http, "ryzanstein_gateway_delivery_seconds_sum", model=MODEL) > 0


async def test_the_journals_lag_is_that_of_what_was_stored(http: httpx.AsyncClient) -> None:
    assert await value(http, "ryzanstein_gateway_journal_lag_seconds") == 0
    await http.post(COMPLETIONS, json=body())
    assert 0 < await value(http, "ryzanstein_gateway_journal_lag_seconds") < 60


@pytest.mark.parametrize("aliases", [True, False])
async def test_vllms_names_can_be_left_out(nats_settings: CommonSettings, aliases: bool) -> None:
    assert GatewaySettings().metrics_aliases is True
    async with run_gateway(nats_settings, metrics_aliases=aliases) as gateway, gateway.http() as http:
        assert ("vllm:" in (await http.get("/metrics")).text) is aliases


async def test_a_refusal_for_a_bound_is_counted_by_its_name(http: httpx.AsyncClient) -> None:
    async def refusals(name: str) -> float:
        key = "ryzanstein_gateway_limit_refusals_total", frozenset({("limit", name)})
        return (await samples(http)).get(key, 0)

    before = await refusals("choices")
    assert (await http.post(COMPLETIONS, json=body(n=129))).status_code == 400
    assert (await http.post(COMPLETIONS, json=body(n=-1))).status_code == 400
    assert await refusals("choices") == before + 1
