"""What the engine of a model cannot do is refused by the gateway, before anything is queued."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.config import CommonSettings
from shared.messages import EngineTraits, GenerationRequest, GroupLoad, GroupRecord, GroupTraits
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, say, stub_card, until

MODEL = "org/behind-sglang"
ENGINE = EngineTraits("sglang", "SGLang 1.0", ["adapter", "sparse", "grammar", "penalties", "cache_salt"])
SENTENCE = "SGLang 1.0, which computes this model, does not support"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 4}


@pytest.fixture
async def gateway(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    await ring.add_model(stub_card(MODEL, engine=ENGINE))
    async with run_gateway(nats_settings) as running, running.http() as http:
        await until_listed(http, MODEL)
        yield running


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"guided_regex": "a+"}, "structured output"),
        ({"frequency_penalty": 0.5, "cache_salt": "s"}, "penalties, cache_salt"),
        ({"sparse_attention": True}, "sparse attention"),
    ],
)
async def test_it_is_refused_at_once_with_the_engines_name(
    http: httpx.AsyncClient, ring: FakeRing, fields: dict[str, Any], what: str
) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", chat)):
        answer = await http.post(path, json=body | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (400, "invalid_request", f"{SENTENCE} {what}.")
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert len(ring.requests) == 1


async def test_no_adapter_is_loaded_for_it(nats_settings: CommonSettings, ring: FakeRing) -> None:
    await ring.add_model(stub_card(MODEL, engine=ENGINE))
    async with run_gateway(nats_settings, model_directories="/adapters") as running, running.http() as http:
        await until_listed(http, MODEL)
        body = {"lora_name": "a", "lora_path": "/adapters/a", "model": MODEL}
        answer = await http.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"{SENTENCE} LoRA adapters.")


async def test_where_a_group_can_the_leaders_refuse(http: httpx.AsyncClient, ring: FakeRing) -> None:
    """A mixed fleet, or an older gateway: what comes of the request is the same."""
    records = await Bucket.open(ring.bus, subjects.GROUPS_BUCKET, GroupRecord)
    traits = GroupTraits(engine=EngineTraits("ring"))
    await records.put("other", GroupRecord("other", MODEL, "ready", 1, [], GroupLoad(), traits=traits))

    async def refuse(fake: FakeRing, request: GenerationRequest) -> None:
        if request.sampling.frequency_penalty:
            error = ("invalid_request", f"{SENTENCE} penalties.", False)
            await fake.emit(request, 0, [], finish="error", error=error)
        else:
            await say(fake, request)

    ring.behave = refuse
    answers: list[httpx.Response] = []

    async def handed_in() -> bool:
        answers.append(await http.post("/v1/completions", json=BODY | {"frequency_penalty": 0.5}))
        return bool(ring.requests)

    await until(handed_in)
    error = answers[-1].json()["error"]
    assert (answers[-1].status_code, error["code"]) == (400, "invalid_request")
    assert error["message"] == f"{SENTENCE} penalties."
