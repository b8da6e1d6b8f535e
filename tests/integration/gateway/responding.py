"""Responses as tests ask for them: their text, their prompts, their place in the store."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import openai
from openai.types.responses import Response, ResponseStreamEvent

from shared.messages.records import StoredResponse
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing

T = TypeVar("T")
RESPONSES = "/v1/responses"


def text_of(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def prompts(ring: FakeRing) -> list[str]:
    return [bytes(request.prompt).decode("latin-1") for request in ring.requests]


async def drop_journal(bus: Bus) -> None:
    """What time does."""
    await bus.jetstream().purge_stream(subjects.JOURNAL_STREAM)


async def until_known(look: Callable[[], Awaitable[T | None]], seconds: float = 10.0) -> T:
    """What `look` finds, once it does."""
    end = time.monotonic() + seconds
    while (found := await look()) is None:
        assert time.monotonic() < end, "it was not found"
        await asyncio.sleep(0.01)
    return found


async def kept(gateway: RunningGateway, identity: str) -> StoredResponse:
    """Waits until the response is in the store."""
    store = gateway.service._backend.parts.responses._store
    return await until_known(lambda: store.get(identity.removeprefix("resp_"), ""))


async def status(client: openai.AsyncOpenAI, identity: str, wanted: str) -> Response:
    """Polls until the response has that status."""

    async def look() -> Response | None:
        shown = await client.responses.retrieve(identity)
        return shown if shown.status == wanted else None

    return await until_known(look)
