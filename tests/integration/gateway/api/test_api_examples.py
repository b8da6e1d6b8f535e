"""The examples of docs/api.md do what the page says."""

import asyncio
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, until
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Event, text_of

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
TEXT = b"One, two, three, and so on to the end."


def example(language: str, contains: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if contains in block]
    return found


async def bash(script: str, directory: Path, *gateways: str) -> str:
    for port, url in zip(("8000", "8001"), gateways, strict=False):
        script = script.replace(f"http://127.0.0.1:{port}", url)
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script, cwd=directory, env=os.environ | {"MODEL": MODEL}, stdout=asyncio.subprocess.PIPE
    )
    shown, _ = await process.communicate()
    return shown.decode()


def events_in(path: Path) -> list[Event]:
    return [(data, "") for data in re.findall(r"^data: (.*)$", path.read_text(), re.MULTILINE)]


async def half(ring: FakeRing, request: GenerationRequest) -> None:
    """Until somebody comes back for the rest, only the beginning is said."""
    for position, token in enumerate(TEXT[:10]):
        await ring.emit(request, position, [token])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_goes_on_at_another_gateway(
    bus: Bus, nats_settings: CommonSettings, gateway: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    ring.behave = half
    async with gateway_process(bus, nats_settings, tmp_path, instance="first") as first:
        running = asyncio.create_task(bash(example("sh", "part.txt"), tmp_path, str(first.http.base_url), gateway.url))
        answers = gateway.service.work.answers
        await until(lambda: [answer for answer in answers.all() if answer.readers], 30)
        (request,) = ring.requests
        for position in range(10, len(TEXT)):
            await ring.emit(request, position, [TEXT[position]])
        await ring.emit(request, len(TEXT), [], finish="stop")
        shown = await running
    before, after = events_in(tmp_path / "part.txt"), events_in(tmp_path / "rest.txt")
    assert text_of(before) == TEXT[:10].decode()
    assert text_of(before) + text_of(after) == TEXT.decode()
    state, _, deleted = shown.partition(
        '{"id":"' + json.loads(before[0][0])["id"] + '","object":"generation","cancelled"'
    )
    assert json.loads(state)["status"] == "completed"
    assert deleted == ":false}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_repeats_a_request(gateway: RunningGateway, ring: FakeRing, tmp_path: Path) -> None:
    shown = await bash(example("sh", "order-66"), tmp_path, gateway.url)
    one, other = (json.loads(line) for line in shown.splitlines())
    assert one == other
    assert len(ring.requests) == 1


async def test_python_survives_the_gateway(
    bus: Bus, nats_settings: CommonSettings, gateway: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    ring.behave = half
    async with gateway_process(bus, nats_settings, tmp_path, instance="first") as first:
        source = example("python", "def chat").replace("http://127.0.0.1:8000", str(first.http.base_url))
        names: dict[str, Any] = {}
        exec(source.replace("http://127.0.0.1:8001", gateway.url), names)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        texts: list[str] = []
        reading = asyncio.create_task(asyncio.to_thread(lambda: texts.extend(_read(names["chat"](body), texts))))
        await until(lambda: "".join(texts) == TEXT[:10].decode(), 20)
        await first.process.end(signal.SIGKILL)
        answers = gateway.service.work.answers
        await until(lambda: [answer for answer in answers.all() if answer.readers])
        (request,) = ring.requests
        for position in range(10, len(TEXT)):
            await ring.emit(request, position, [TEXT[position]])
        await ring.emit(request, len(TEXT), [], finish="stop")
        await reading
    assert "".join(texts) == TEXT.decode()


def _read(pieces: Any, into: list[str]) -> list[str]:
    for piece in pieces:
        into.append(piece)
    return []
