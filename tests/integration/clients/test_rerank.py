"""Rerank and score by each client at a real gateway: as its README has it, repeated when its connection is cut."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ryzanstein_client import ApiError, AsyncClient, Client, RankedDocument, Ranking
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.clients import test_client, test_go, test_typescript
from tests.integration.clients.cutting import Cutting, cutting
from tests.integration.clients.programs import Command, running, rust, typescript_script
from tests.integration.clients.test_typescript import run_script
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, stub_card, until
from tests.integration.gateway.intake.test_scoring import send

MODEL = "bge-reranker-v2-m3"
BREAD, PARIS = "Bread is baked.", "Paris is the capital of France."
ASKED: dict[str, Any] = {"model": MODEL, "query": "Where?", "documents": [BREAD, PARIS]}
PAIRS: dict[str, Any] = {"model": MODEL, "queries": "Where?", "documents": [BREAD, PARIS]}


class Judge:
    """Whatever speaks of Paris answers, when the test lets it."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def __call__(self, ring: FakeRing, request: GenerationRequest) -> None:
        await self.free.wait()
        await send(ring, request, 1.0 if b"Paris" in bytes(request.prompt) else 0.0)


@pytest.fixture
async def judge(ring: FakeRing) -> Judge:
    """Of a model whose logits are its scores."""
    ring.behave = found = Judge()
    one = {"tasks": ["classify"], "labels": ["relevant"], "activation": "identity"}
    await ring.add_model(stub_card(MODEL, **one))
    return found


@pytest.fixture
async def patient(nats_settings: CommonSettings, judge: Judge) -> AsyncIterator[RunningGateway]:
    """A gateway that knows the model, and keeps what nobody waits for as long as a loaded machine may need."""
    async with run_gateway(nats_settings, resume_grace=60.0) as running, running.http() as http:
        await until_listed(http, MODEL)
        yield running


@pytest.fixture
async def way(patient: RunningGateway) -> AsyncIterator[Cutting]:
    async with cutting(patient.url) as found:
        yield found


async def readme(language: str, url: str, directory: Path) -> Command:
    """The README's program, for this gateway."""
    if language == "go":
        return await test_go.example(1, directory, url)
    if language == "rust":
        return await asyncio.to_thread(rust, "readme_1")
    if language == "python":
        return test_client.example("client.rerank", url)
    return await asyncio.to_thread(typescript_script, test_typescript.example(".rerank(", url))


@pytest.mark.parametrize("language", ["python", "typescript", "go", "rust"])
async def test_the_readme_under_one_key(
    language: str, way: Cutting, judge: Judge, ring: FakeRing, tmp_path: Path
) -> None:
    command = await readme(language, way.url, tmp_path)
    async with running(command, way.url) as program:
        await until(lambda: len(ring.requests) == 2 or program.said.done(), 30)
        way.cut()
        judge.free.set()
        shown = await program.end()
    printed = re.sub(r".* stamina\.retry_scheduled .*\n", "", shown)  # told to structlog, which is here
    assert re.sub(r"\.0\b", "", printed) == f"1 1 {PARIS}\n0 0 {BREAD}\n"
    assert len(ring.requests) == 2


async def by_thread(url: str, **more: Any) -> tuple[Ranking, list[float]]:
    def both() -> tuple[Ranking, list[float]]:
        with Client(url) as client:
            return client.rerank(**ASKED, **more), client.score(**PAIRS)

    return await asyncio.to_thread(both)


async def by_loop(url: str, **more: Any) -> tuple[Ranking, list[float]]:
    async with AsyncClient(url) as client:
        return await client.rerank(**ASKED, **more), await client.score(**PAIRS)


@pytest.mark.parametrize("ask", [by_thread, by_loop], ids=["blocking", "async"])
async def test_what_python_brings(ask: Any, patient: RunningGateway, judge: Judge, ring: FakeRing) -> None:
    judge.free.set()
    ranking, scores = await ask(patient.url, idempotency_key="mine")
    assert ranking.results == [RankedDocument(1, 1.0, PARIS), RankedDocument(0, 0.0, BREAD)]
    assert ranking.raw["model"] == MODEL
    assert scores == [0.0, 1.0]
    again, _ = await ask(patient.url, idempotency_key="mine")
    assert again == ranking
    assert len(ring.requests) == 6, "the first ranking, and the scores twice"
    best, _ = await ask(patient.url, top_n=1, return_documents=False)
    assert best.results == [RankedDocument(1, 1.0, None)]
    for wrong, code, param in (
        ({"rank_fields": ["title"]}, "unsupported_parameter", "rank_fields"),
        ({"top_n": -1}, "integer_below_min_value", "top_n"),
    ):
        with pytest.raises(ApiError) as caught:
            await ask(patient.url, **wrong)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


async def test_python_waits_for_an_answer_longer_than_for_a_stream(
    patient: RunningGateway, judge: Judge, ring: FakeRing
) -> None:
    """`timeout` is no bound of it, `answer_timeout` is; what is asked again under its key is one ranking."""
    async with AsyncClient(patient.url, timeout=0.05, answer_timeout=600, patience=0.01) as client:
        waiting = asyncio.create_task(client.rerank(**ASKED, idempotency_key="mine"))
        async with AsyncClient(patient.url, answer_timeout=0.05, patience=0.3) as hasty:
            with pytest.raises(httpx.TimeoutException):
                await hasty.rerank(**ASKED, idempotency_key="mine")
        judge.free.set()
        assert [found.index for found in (await waiting).results] == [1, 0]
    assert len(ring.requests) == 2


CALLS = """
import { ApiError, Client } from "ryzanstein-client";
const client = new Client(process.env.RYZANSTEIN_URL);
const pairs = { model: "bge-reranker-v2-m3", documents: ["Bread", "Paris"] };
const best = await client.rerank({ ...pairs, query: "Where?", top_n: 1, return_documents: false });
const scores = await client.score({ ...pairs, queries: "Where?" });
const wrong = await client.rerank({ ...pairs, query: "Where?", top_k: 1 }).catch((error) => error);
console.log(JSON.stringify([best.results, best.usage.total_tokens > 0, scores.data.map((pair) => pair.score),
  wrong instanceof ApiError, wrong.status, wrong.param]));
"""


async def test_what_typescript_brings(patient: RunningGateway, judge: Judge) -> None:
    judge.free.set()
    seen = json.loads(await run_script(CALLS, patient.url))
    assert seen == [[{"index": 1, "relevance_score": 1}], True, [0, 1], True, 400, "top_k"]
