"""Ollama's Python client: chats, prompts and vectors, and what the lines say that others do not."""

from collections.abc import AsyncIterator

import httpx
import ollama
import pytest

from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def ollamas(gateway: RunningGateway) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=gateway.url, timeout=20)
    yield client
    await client._client.aclose()


async def test_chat(ollamas: ollama.AsyncClient) -> None:
    answer = await ollamas.chat(MODEL, HI, options={"num_predict": 100, "temperature": 0})
    assert answer.message.content == "Hello, world!"
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (3, 13)
    assert all((answer.total_duration, answer.eval_duration, answer.prompt_eval_duration))


async def test_stream(http: httpx.AsyncClient) -> None:
    answer = await http.post("/api/chat", json={"model": MODEL + ":latest", "messages": HI})
    assert answer.headers["content-type"] == "application/x-ndjson"
