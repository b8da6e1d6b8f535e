"""LoRA adapters through the whole house: read by a host, used by name, through the death of a ring and a restart."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from services.cli.target import nats_of_stack
from services.executor.worker.stub import adapted, stub_token
from shared.messages.registry import AdapterRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.adapters import make_adapter
from tests.e2e.stack import Stack, run_cli

STUB = ("--engine", "stub", "--no-smoke-test", "--replicas", "2")
REGISTERED, USED, SLOTS = 1000, 50, 16
FEW = {"RYZANSTEIN_MAX_ADAPTERS": str(SLOTS), "RYZANSTEIN_STUB_STEP_MS": "4"}


def text_of(seed: int, digest: str, tokens: int) -> str:
    return bytes(stub_token(adapted(seed, digest), position) for position in range(tokens)).decode()


async def register_many(stack: Stack, digest: str) -> None:
    """Names beside those that are used."""
    async with Bus.session(nats_of_stack(stack.data_dir, ""), "test") as bus:
        names = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
        for number in range(USED, REGISTERED):
            await names.put(f"a{number}", AdapterRecord(f"a{number}", "stub", "/a", digest, 8, 400))


async def complete(client: httpx.AsyncClient, number: int, tokens: int, began: asyncio.Event) -> tuple[str, str]:
    """The text that the adapter of that number writes, read from a stream, and what answers. `began`: its first tokens
    have come."""
    body = {"model": f"a{number}", "prompt": "x", "max_tokens": tokens, "seed": number, "stream": True}
    text, model = "", ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                text, model = text + event["choices"][0]["text"], event["model"]
                began.set()
    return text, model


async def use(stack: Stack, digests: list[str], tokens: int, *, kill: bool) -> None:
    limits = httpx.Limits(max_connections=USED)
    async with httpx.AsyncClient(base_url=stack.url, timeout=90, limits=limits) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert sum(1 for one in listed if one["parent"] == "stub") == REGISTERED
        began = asyncio.Event()
        running = [asyncio.create_task(complete(client, number, tokens, began)) for number in range(USED)]
        if kill:
            await began.wait()
            group = (await asyncio.to_thread(stack.status))["groups"][0]
            os.kill(group["ranks"][0]["pid"], signal.SIGKILL)
        for number, answer in enumerate(await asyncio.gather(*running)):
            assert answer == (text_of(number, digests[number], tokens), f"a{number}")


@pytest.mark.nightly
async def test_a_thousand_adapters_fifty_in_use(tmp_path: Path) -> None:
    """Fewer slots than adapters in use; a ring dies while they stream; the whole stack comes back."""
    sources = [tmp_path / "adapters" / str(number) for number in range(USED)]
    digests = [make_adapter(source, number) for number, source in enumerate(sources)]
    options = (*STUB,)
    data, environment = tmp_path / "data", {**FEW, "RYZANSTEIN_MODEL_DIRECTORIES": str(tmp_path / "adapters")}
    environment["RYZANSTEIN_MODEL_CACHE"] = str(tmp_path / "cache")
    with Stack(data, *options, **environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            for number, source in enumerate(sources[1:], 1):
                body = {"lora_name": f"a{number}", "lora_path": str(source)}
                answer = await client.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code == 200, answer.text
        loaded = await asyncio.to_thread(
            run_cli, "adapters", "load", "a0", str(sources[0]), "--data-dir", str(data), "--json"
        )
        assert json.loads(loaded.stdout)["digest"] == digests[0], loaded.stderr
        await register_many(stack, digests[1])
        await until_listed(stack)
        await use(stack, digests, 300, kill=True)
    with Stack(data, *options, **environment) as stack:
        await until_listed(stack)
        await use(stack, digests, 20, kill=False)
        loads = [line for line in stack.logs("gateway*").splitlines() if "adapter_registered" in line]
        assert len(loads) == USED - 1, "nobody has registered anything again"


async def until_listed(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as client, asyncio.timeout(30):
        while True:
            if len((await client.get("/v1/loras")).json()["data"]) == REGISTERED:
                return
            await asyncio.sleep(0.1)
