"""A gateway with a stub model behind it that says what a script has for each turn, and programs that talk to it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, say, stub_card

HERE = Path(__file__).parent
MODEL = "stub"
# Tokens, which are bytes here: agents begin with some 100,000 of instructions and tools.
AGENTS_CONTEXT = 1 << 20
Turn = tuple[str, str]  # what a prompt has in it, and what is answered then


def calling(name: str, arguments: Mapping[str, Any]) -> str:
    """A call of a tool, as the stub model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """What the stub model says: the answer of the last turn whose words stand in the prompt."""

    def __init__(self, ring: FakeRing) -> None:
        self.turns: Sequence[Turn] = ()
        self.prompts: list[str] = []  # of the requests that were answered by a turn
        ring.behave = self._say

    async def _say(self, ring: FakeRing, request: GenerationRequest) -> None:
        prompt = bytes(request.prompt).decode("latin-1")
        known = [answer for words, answer in self.turns if words in prompt]
        if known:
            self.prompts.append(prompt)
        await say(ring, request, known[-1] if known else "Fine.")


@pytest.fixture
async def ring(bus: Bus) -> AsyncIterator[FakeRing]:
    fake = FakeRing(bus)
    await fake.start(stub_card(MODEL, context_length=AGENTS_CONTEXT))
    yield fake
    await fake.stop()


@pytest.fixture
def script(ring: FakeRing) -> Script:
    return Script(ring)


@pytest.fixture
async def gateway(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings) as running:
        yield running


Program = Callable[..., Awaitable[str]]


@pytest.fixture
def program() -> Program:
    """Runs a command to its end beside the gateway; returns what it has printed. It gets no variable but `variables`
    and PATH."""

    async def run(*command: str, cwd: Path | None = None, **variables: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env={"PATH": os.environ["PATH"], **variables},
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, f"{out.decode()}\n{errors.decode()}"
        return out.decode()

    return run
