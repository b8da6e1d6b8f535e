"""The gateway as a process, and a model with a real tokenizer behind it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import httpx
import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.fake_ring import FakeRing, stub_card
from tests.processes import nats_variables
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files


async def start(nats: CommonSettings, *options: str) -> asyncio.subprocess.Process:
    environment = os.environ | nats_variables(nats) | {"RYZANSTEIN_LOG_FORMAT": "console"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", *options, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def test_it_starts_answers_and_stops_on_a_signal(nats_settings: CommonSettings, ring: FakeRing) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await start(nats_settings, "--port", str(port))
    try:
        while b"ready" not in (line := await process.stderr.readline()):
            assert line, "the gateway ended at its start"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            body = {"model": "org/stub-model", "prompt": "x"}
            answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "trace-7"})
            assert answer.json()["choices"][0]["text"] == "Hello, world!"
        process.send_signal(signal.SIGTERM)
        rest = await process.stderr.read()
        assert await process.wait() == 0
        assert b"trace-7" in rest
        assert b"Traceback" not in rest
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--port", "seventy"], 1, b"RYZANSTEIN_PORT"),
        (["--body-limit", "0"], 1, b"--body-limit"),
        (["--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout", "0.3", "--port", "0"], 1, b"did not answer"),
        (["--colour", "red"], 2, b"--colour"),
    ],
)
async def test_wrong_settings_are_one_sentence(
    nats_settings: CommonSettings, options: list[str], code: int, words: bytes
) -> None:
    process = await start(nats_settings, *options)
    _, shown = await process.communicate()
    assert process.returncode == code, shown
    assert words in shown
    assert b"Traceback" not in shown


async def test_a_taken_port_is_named(nats_settings: CommonSettings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start(nats_settings, "--port", str(port))
        _, shown = await process.communicate()
    assert process.returncode == 1
    assert f"Port {port} on 127.0.0.1 is taken".encode() in shown


async def test_a_model_with_a_tokenizer_of_its_own(http: httpx.AsyncClient, ring: FakeRing) -> None:
    await ring.add_tokenizer("tiny", tiny_files())
    await ring.add_model(stub_card("tiny", tokenizer="tiny", vocab_size=258, eos_token_ids=[1]))
    await until_listed(http, "tiny")

    async def echo(fake: FakeRing, request: GenerationRequest) -> None:
        """Says what the user said, one token a frame, and the end-of-sequence token."""
        start = len(request.prompt) - 1 - request.prompt[::-1].index(0)
        said = request.prompt[request.prompt.index(0) + 6 : start - 2]
        for position, token in enumerate(said):
            await fake.emit(request, position, [token])
        await fake.emit(request, len(said), [1], finish="stop")

    ring.behave = echo
    text = "\u00fcber \U0001f600 \u2603"
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens"] == len(text.encode()) + 1
    streamed = await http.post("/v1/chat/completions", json=body | {"stream": True, "logprobs": True})
    assert "\ufffd" not in streamed.text.replace('"token":"\ufffd"', "")


async def test_a_broken_tokenizer_is_a_fault_of_ours(http: httpx.AsyncClient, ring: FakeRing) -> None:
    await ring.add_tokenizer("broken", {"tokenizer.json": b"{}"})
    await ring.add_model(stub_card("broken", tokenizer="broken"))
    await until_listed(http, "broken")
    answer = await http.post("/v1/completions", json={"model": "broken", "prompt": "x"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
