"""The TypeScript client: its own tests, its package, and real gateways; browsers are in `test_browser.py`."""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.nats.bus import Bus
from tests.integration.clients.cutting import cutting
from tests.integration.clients.programs import (
    ROOT,
    TYPESCRIPT,
    blocks,
    linter,
    run,
    run_npm,
    running,
    typescript,
    typescript_client,
    typescript_script,
)
from tests.integration.gateway.batches.conftest import served
from tests.integration.gateway.batches.helpers import requests
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, saying
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Paced

__all__ = ["served"]

TEXT = "Once upon a time, a connection was lost, and nobody who listened noticed."


async def run_script(source: str, url: str) -> str:
    return await run(await asyncio.to_thread(typescript_script, source), url)


@pytest.mark.slow
async def test_its_own_tests_and_the_types_of_its_examples() -> None:
    directory = await asyncio.to_thread(typescript_client)
    assert "# fail 0" in await asyncio.to_thread(run_npm, directory, "test")
    await asyncio.to_thread(run_npm, directory, "run", "check")


@pytest.mark.slow
async def test_all_javascript_is_linted() -> None:
    """The client's, the examples', the console's and the tests'."""
    command = await asyncio.to_thread(linter)
    # It takes a member that only `??=` reads for one that nobody does; TypeScript looks for them too.
    allowed = ("--allow", "no-unused-private-class-members")
    places = ("clients/typescript", "docs/clients", "services/gateway/api/console/static", "tests/clients")
    ignored = ("--ignore-pattern", "**/vendor/**")
    done = await asyncio.to_thread(
        subprocess.run, [*command, *allowed, *ignored, *places], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_what_is_packed() -> None:
    directory = await asyncio.to_thread(typescript_client)
    told = await asyncio.to_thread(run_npm, directory, "pack", "--dry-run", "--json", "--ignore-scripts")
    (package,) = json.loads(told)
    packed = {file["path"] for file in package["files"]}
    modules = {path.stem for path in (TYPESCRIPT / "src").glob("*.ts")}
    made = {f"dist/{name}{suffix}" for name in modules for suffix in (".js", ".d.ts")}
    assert packed == {"LICENSE", "README.md", "package.json"} | made
    assert list(json.loads((TYPESCRIPT / "package.json").read_text())["dependencies"]) == ["eventsource-parser"]


RESPONSE = """
import { Client } from "ryzanstein-client";
const client = new Client(process.env.RYZANSTEIN_URL.split(","));
const stream = client.streamResponse({ model: process.env.MODEL, input: "Hi" });
for await (const piece of stream) process.stdout.write(piece.text);
console.log(`\\n${stream.cursor.generation.slice(0, 5)}`);
"""


async def test_a_response_survives_its_connection_and_its_gateway(
    bus: Bus, nats_settings: CommonSettings, gateway: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    """The examples' stream of a chat does in `test_examples.py`."""
    command = await asyncio.to_thread(typescript_script, RESPONSE)
    ring.behave = paced = Paced(TEXT.encode(), 10)
    async with (
        gateway_process(bus, nats_settings, tmp_path) as doomed,
        cutting(str(doomed.http.base_url)) as first,
        running(command, f"{first.url},{gateway.url}", MODEL=MODEL) as program,
    ):
        await program.until(lambda text: len(text) >= 10)
        first.cut()
        paced.allow(25)
        await program.until(lambda text: len(text) >= 25)
        await doomed.kill()
        paced.allow()
        assert await program.end() == f"{TEXT}\nresp_\n"
    assert len(ring.requests) == 1


CALLS = """
import { ApiError, Client, textOf } from "ryzanstein-client";
const client = new Client(process.env.RYZANSTEIN_URL);
const [model] = await client.models();
const messages = [{ role: "user", content: "Hi" }];
const idempotencyKey = "mine";
const answers = [];
for (let n = 0; n < 2; n += 1) answers.push(await client.chat({ model, messages }, { idempotencyKey }));
const code = async (call) => {
  try {
    await call();
  } catch (error) {
    if (error instanceof ApiError) return [error.status, error.code, error.param, error.requestId !== ""];
    throw error;
  }
};
const cursor = await client.startChat({ model, messages });
const text = await client.attach(cursor).text();
const state = await client.state(cursor);
console.log(JSON.stringify({
  once: answers[0].id === answers[1].id,
  texts: [...answers.map(textOf), text, state.text],
  completion: textOf(await client.completion({ model, prompt: "x", max_tokens: 99 })),
  response: textOf(await client.response({ model, input: "x" })),
  state: [state.status, state.over, state.model === model],
  cancelled: await client.cancel(cursor),
  rest: await client.attach(cursor, { after: state.position }).text(),
  refused: [
    await code(() => client.chat({ model: "none", messages })),
    await code(() => client.streamChat({ model, messages, temperature: 9 }).text()),
    await code(() => client.chat({ model, messages, seed: 1 }, { idempotencyKey })),
    await code(() => client.embeddings({ model, input: [] })),
  ],
}));
"""


async def test_what_its_calls_bring(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = saying(TEXT)
    seen: dict[str, Any] = json.loads(await run_script(CALLS, gateway.url))
    assert seen == {
        "once": True,
        "texts": [TEXT] * 4,
        "completion": TEXT,
        "response": TEXT,
        "state": ["completed", True, True],
        "cancelled": False,
        "rest": "",
        "refused": [
            [404, "model_not_found", "model", True],
            [400, "decimal_above_max_value", "temperature", True],
            [422, "idempotency_key_reused", "Idempotency-Key", True],
            [400, "empty_array", "input", True],
        ],
    }
    assert len(ring.requests) == 4


async def test_a_batch(gateway: RunningGateway, served: openai.AsyncOpenAI, ring: FakeRing, tmp_path: Path) -> None:
    """The example twice with one key: one file, one batch, the same results."""

    async def behave(ring: FakeRing, request: GenerationRequest) -> None:
        await say(ring, request, "Yes.")

    ring.behave = behave
    (tmp_path / "input.jsonl").write_bytes(requests(20))
    command = [*await asyncio.to_thread(typescript, "batch"), str(tmp_path / "input.jsonl")]
    shown = [await run(command, gateway.url, RYZANSTEIN_KEY="nightly") for _ in range(2)]
    assert shown[0] == shown[1]
    lines = [json.loads(line) for line in shown[0].splitlines()]
    assert {line["custom_id"] for line in lines} == {f"c{number}" for number in range(20)}
    assert len(lines) == len(ring.requests) == 20
    assert len((await served.batches.list()).data) == 1


def example(contains: str, *gateways: str) -> str:
    """A block of the README, for these gateways."""
    (found,) = [block for block in blocks(TYPESCRIPT, "js") if contains in block]
    for port, url in zip(("8000", "8001"), gateways, strict=False):
        found = found.replace(f"http://127.0.0.1:{port}", url)
    return found.replace("SmolLM2-135M-Instruct", MODEL)


@pytest.mark.parametrize("contains", ["const piece of stream) process", "JSON.parse(saved)"])
async def test_streams_of_the_readme(
    contains: str, gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = saying(TEXT)
    shown = await run_script(example(contains, gateway.url, other.url), gateway.url)
    assert shown.removesuffix("\n") == TEXT
    assert len(ring.requests) == 1


@pytest.mark.slow
async def test_the_rest_of_the_readme(
    gateway: RunningGateway, served: openai.AsyncOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.jsonl").write_bytes(requests(3))
    monkeypatch.chdir(tmp_path)
    shown = await run_script(example("openAsBlob", gateway.url), gateway.url)
    assert "completed 3 of 3\n" in shown
    assert sorted(re.findall(r"^(c\d) 200$", shown, re.MULTILINE)) == ["c0", "c1", "c2"]
    assert await run_script(example("error.code", gateway.url), gateway.url) == "404 model_not_found\n"
