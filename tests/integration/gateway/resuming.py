"""Streams read event by event, and rings whose tokens come when the test says so."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from shared.messages import GenerationRequest
from tests.integration.gateway.fake_ring import FakeRing

Event = tuple[str, str]  # data and id


async def events_of(response: httpx.Response) -> AsyncIterator[Event]:
    data, identity = "", ""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif line.startswith("id: "):
            identity = line.removeprefix("id: ")
        elif not line and data:
            yield data, identity
            data, identity = "", ""


async def read_events(response: httpx.Response, characters: int | None = None) -> list[Event]:
    """Events of a stream until its first choice has as many `characters`, or all to its end."""
    found: list[Event] = []
    async for event in events_of(response):
        found.append(event)
        if characters is not None and len(text_of(found)) >= characters:
            break
    return found


async def streamed(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], characters: int | None = None, **options: Any
) -> list[Event]:
    """As `read_events`, of a request; then the client goes."""
    async with http.stream("POST", path, json=body, **options) as response:
        assert response.status_code == 200, await response.aread()
        return await read_events(response, characters)


async def resumed(http: httpx.AsyncClient, identity: str, last: str = "") -> list[Event]:
    """What a generation's stream has behind the event `last`."""
    headers = {"Last-Event-ID": last} if last else {}
    async with http.stream("GET", f"/v1/generations/{identity}/stream", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return await read_events(response)


def text_of(events: list[Event], choice: int = 0) -> str:
    """What these events add to the text of a choice."""
    text = ""
    for data, _ in events:
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        for item in chunk["choices"]:
            if item["index"] == choice:
                text += item["delta"].get("content", "") if "delta" in item else item["text"]
    return text


def finishes(events: list[Event]) -> list[str]:
    """The finish reasons in these events."""
    chunks = [json.loads(data) for data, _ in events if data != "[DONE]"]
    return [item["finish_reason"] for chunk in chunks for item in chunk["choices"] if item["finish_reason"]]


class Paced:
    """Says `tokens` one a frame: up to `allowed`, then the rest when it grows."""

    def __init__(self, tokens: bytes, allowed: int) -> None:
        self.tokens = tokens
        self.allowed = allowed
        self._more = asyncio.Event()

    def allow(self, count: int | None = None) -> None:
        self.allowed = len(self.tokens) + 1 if count is None else count
        self._more.set()

    async def __call__(self, ring: FakeRing, request: GenerationRequest) -> None:
        for position in range(len(request.generated), len(self.tokens)):
            await self._until(position)
            await ring.emit(request, position, [self.tokens[position]])
        await self._until(len(self.tokens))
        await ring.emit(request, len(self.tokens), [], finish="stop")

    async def _until(self, position: int) -> None:
        while position >= self.allowed:
            self._more.clear()
            await self._more.wait()


def public_id(events: list[Event]) -> str:
    identity: Any = json.loads(events[0][0])["id"]
    return str(identity)
