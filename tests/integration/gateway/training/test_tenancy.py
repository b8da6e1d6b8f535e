"""What a fine-tuning job has made is its tenant's alone, whichever API asks; others learn nothing of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.batches.helpers import ready
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing
from tests.integration.gateway.training.fake_trainer import FakeTrainer, submit, until_status


@pytest.fixture
async def gateway(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings) as running:
        yield running


async def status(http: httpx.AsyncClient, method: str, path: str, body: object = None) -> tuple[int, str]:
    """And what is said, without the request's id."""
    headers = {"x-request-id": "one"}
    answer = await http.request(method, path, headers=headers, **({"json": body} if body else {}))
    return answer.status_code, answer.text


async def test_a_model_is_its_tenants_alone(
    bus: Bus, gateway: RunningGateway, ring: FakeRing, keys: Keys, tmp_path: Path
) -> None:
    await ready(ring)
    mine, theirs = await keys.make("acme"), await keys.make("other", manage_models=True)
    for key in (mine, theirs):
        await changes_to(gateway, bearer(key), 200)
    trainer = FakeTrainer(bus, tmp_path, "acme")
    await trainer.start()
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=mine.token, max_retries=0) as client,
        gateway.http(headers=bearer(mine)) as owner,
        gateway.http(headers=bearer(theirs)) as other,
    ):
        job = await submit(client)
        path = f"/v1/fine_tuning/jobs/{job.id}"
        for one in (path, f"{path}/events", f"{path}/checkpoints", f"{path}/events?stream=true"):
            assert (await status(other, "GET", one))[0] == 404
        assert (await status(other, "POST", f"{path}/cancel"))[0] == 404
        assert (await other.get("/v1/fine_tuning/jobs")).json()["data"] == []
        await trainer.take(job.id)
        await trainer.finish(job.id, 1)
        name = (await until_status(client, job.id, "succeeded")).fine_tuned_model or ""
        assert name == f"ft:{MODEL}:acme::{job.id[6:18]}"

        asked: list[tuple[str, str, object]] = [
            ("GET", f"/v1/models/{name}", None),
            ("GET", f"/v1/loras/{name}", None),
            ("POST", "/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 2}),
            ("POST", "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "a"}]}),
            ("POST", "/v1/responses", {"model": name, "input": "Hi"}),
            ("POST", "/v1/messages", {"model": name, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}),
            ("POST", "/api/show", {"model": name}),
            ("POST", "/api/generate", {"model": name, "prompt": "Hi", "stream": False}),
            ("POST", "/tokenize", {"model": name, "prompt": "Hi"}),
        ]
        for method, url, body in asked:
            code, said = await status(other, method, url, body)
            assert code == 404, (url, said)
            unknown = json.loads(json.dumps(body).replace(name, f"{name}x")) if body else None
            nothing = await status(other, method, url.replace(name, f"{name}x"), unknown)
            assert (code, said.replace(name, "")) == (nothing[0], nothing[1].replace(f"{name}x", "")), url
            assert (await status(owner, method, url, body))[0] == 200, url
        for url in ("/v1/models", "/v1/loras", "/api/tags"):
            assert name not in (await other.get(url)).text
            assert name in (await owner.get(url)).text

        line = {"model": name, "prompt": "Hi", "max_tokens": 2}
        for http, failed in ((owner, 0), (other, 1)):
            data = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": line})
            file = await http.post("/v1/files", files={"file": ("a.jsonl", data.encode())}, data={"purpose": "batch"})
            given = {"endpoint": "/v1/completions", "completion_window": "1h", "input_file_id": file.json()["id"]}
            batch = (await http.post("/v1/batches", json=given)).json()["id"]
            async with asyncio.timeout(40):
                while True:
                    found = (await http.get(f"/v1/batches/{batch}")).json()
                    if found["status"] in ("completed", "failed"):
                        break
                    await asyncio.sleep(0.05)
            assert found["status"] == ("failed" if failed else "completed"), found

        load = {"lora_name": name, "lora_path": "org/name", "load_inplace": True}
        assert (await status(other, "POST", "/v1/load_lora_adapter", load))[0] == 400
        assert (await status(other, "DELETE", f"/v1/models/{name}"))[0] == 404
        assert (await status(other, "POST", "/v1/unload_lora_adapter", {"lora_name": name}))[0] == 404
        assert (await status(owner, "DELETE", f"/v1/models/{MODEL}"))[0] == 403, "it may not manage models"
        assert (await status(owner, "DELETE", f"/v1/models/{name}"))[0] == 200
        assert (await status(owner, "GET", f"/v1/models/{name}"))[0] == 404
