"""Clients that read their answers as they come: server-sent events, in every mood.

stream       reads to the end; what breaks is resumed behind the last event, at any gateway
completion   the same of /v1/completions
hasty        moves on after 3 s of silence, and lets nobody wait long for it
slow         stops reading in between, as long as it likes
leaving      goes away in the middle and does not come back
cancelling   says so: DELETE /v1/generations/{id}
response     /v1/responses, resumed by the number of its last event
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from tests.simulation.clients.ask import SILENCE, Lost, Refused, events_of, exchange, refusal
from tests.simulation.clients.client import HEADERS, Client, take_chunk, take_response
from tests.simulation.clients.history import Request, Try, Wanted
from tests.simulation.core.asgi import Exchange

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Stream(Client):
    kind: ClassVar[str] = "stream"
    path: ClassVar[str] = CHAT
    headers: ClassVar[dict[str, str]] = HEADERS
    silence: ClassVar[float] = SILENCE

    def made(self) -> tuple[dict[str, Any], Wanted]:
        body, wanted = self.chat()
        return {**body, "stream_options": {"include_usage": True}}, wanted

    async def once(self) -> None:
        request = self.request(*self.made())
        await self.until_answered(request, lambda gateway, tried: self.read(gateway, request, tried))

    async def read(self, gateway: str, request: Request, tried: Try) -> None:
        """Of this gateway, to the end. Raises `Lost`, `Refused`."""
        async with self.asked(gateway, request) as asked:
            ended = False
            async for position, data in events_of(asked, self.silence):
                await self.between(request, asked)
                if data == b"[DONE]":
                    ended = True
                    break
                take_chunk(request, json.loads(data))
                request.position = position or request.position
                self.history.saw(request)
        if not ended:
            request.fault = request.fault or "the stream ended without [DONE]"

    def asked(self, gateway: str, request: Request) -> Exchange:
        """What is asked now: the rest of what is known, or everything."""
        if request.identity and request.position != "":
            path = f"/v1/generations/{request.identity}/stream"
            headers = {"Last-Event-ID": str(request.position)}
            return exchange(gateway, "GET", path, None, headers, self.around.token)
        request.begin_again()
        body = {**request.body, "stream": True}
        return exchange(gateway, "POST", self.path, body, self.headers, self.around.token)

    async def between(self, request: Request, asked: Exchange) -> None:
        """Before an event is taken."""


class Completion(Stream):
    kind: ClassVar[str] = "completion"
    path: ClassVar[str] = COMPLETIONS

    def made(self) -> tuple[dict[str, Any], Wanted]:
        body, wanted = self.drawn(self.seed())
        return {**body, "prompt": self.words(), "stream_options": {"include_usage": True}}, wanted


class Hasty(Stream):
    """Goes elsewhere after a few seconds of silence, and soon nobody waits for it where it was."""

    kind: ClassVar[str] = "hasty"
    headers: ClassVar[dict[str, str]] = {"X-Ryzanstein-Background": "8"}
    silence: ClassVar[float] = 3.0

    async def read(self, gateway: str, request: Request, tried: Try) -> None:
        try:
            await super().read(gateway, request, tried)
        except Refused:
            if tried.resumes:  # it has come too late: it begins anew
                request.identity, request.position = "", ""
            raise


class Slow(Stream):
    """Its connection fills up, and its gateway waits."""

    kind: ClassVar[str] = "slow"

    async def between(self, request: Request, asked: Exchange) -> None:
        if self.draw.random() < 0.05:
            asked.hold()
            await asyncio.sleep(self.draw.uniform(*self.plan.wait))
            asked.go_on()


class Leaving(Stream):
    """Nobody knows when; it does not come back."""

    kind: ClassVar[str] = "leaving"

    async def once(self) -> None:
        request = self.request(*self.made())
        gateway = self.around.gateway()
        tried = Try(self.around.now, gateway)
        request.tries.append(tried)
        try:
            async with asyncio.timeout(self.draw.uniform(0, 3.0)):
                await self.read(gateway, request, tried)
            self.history.ended(request, "answered", self.around.now)
        except (Lost, Refused, TimeoutError):
            self.history.ended(request, "left", self.around.now)
        tried.ending, tried.until = "left", self.around.now

    def asked(self, gateway: str, request: Request) -> Exchange:
        body = {**request.body, "stream": True}
        return exchange(gateway, "POST", self.path, body, {}, self.around.token)


class Cancelling(Stream):
    """Cancels in the middle, at any gateway, and reads what still comes."""

    kind: ClassVar[str] = "cancelling"
    _after = 0  # pieces of text that it reads before

    async def once(self) -> None:
        request, self._after = self.request(*self.made()), self.draw.randint(0, 10)
        answered = await self.until_answered(request, lambda gateway, tried: self.read(gateway, request, tried))
        if answered and request.cancel_asked and request.finish != request.wanted.finish:
            request.outcome = "cancelled"

    async def between(self, request: Request, asked: Exchange) -> None:
        if request.identity and request.arrivals >= self._after and not request.cancel_asked:
            await self._cancel(request)

    async def _cancel(self, request: Request) -> None:
        request.cancel_asked = True
        try:
            await self.around.insist("DELETE", f"/v1/generations/{request.identity}")
        except Refused as error:
            if error.status != 404:  # it has ended, and is forgotten
                request.fault = f"its cancellation was refused: {error}"

    def end_refused(self, request: Request, error: Refused) -> None:
        if request.cancel_asked:
            self.history.ended(request, "cancelled", self.around.now)
        else:
            super().end_refused(request, error)


class Response(Stream):
    kind: ClassVar[str] = "response"

    def made(self) -> tuple[dict[str, Any], Wanted]:
        body, wanted = self.response()
        return {**body, "background": True}, wanted

    def asked(self, gateway: str, request: Request) -> Exchange:
        if request.identity and request.position != "":
            path = f"{RESPONSES}/{request.identity}?stream=true&starting_after={request.position}"
            return exchange(gateway, "GET", path, None, {}, self.around.token)
        request.begin_again()
        body = {**request.body, "stream": True}
        return exchange(gateway, "POST", RESPONSES, body, {}, self.around.token)

    async def read(self, gateway: str, request: Request, tried: Try) -> None:
        async with self.asked(gateway, request) as asked:
            async for event in _json_events(asked):
                if self._take(request, event):
                    return
        raise Lost("the stream ended before its response did")

    def _take(self, request: Request, event: dict[str, Any]) -> bool:
        """Whether it is the last one. Raises `Refused`."""
        kind, number = event["type"], event["sequence_number"]
        if kind == "error":
            raise refusal(event)
        expected = 0 if request.position == "" else request.position + 1
        if number != expected:
            request.fault = request.fault or f"event {number} came where {expected} was next"
        request.position = number
        if kind == "response.created":
            request.called(event["response"]["id"])
        elif kind == "response.output_text.delta":
            request.arrived(event["delta"], self.around.now)
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            if (text := take_response(request, event["response"])) != request.text:
                request.fault = request.fault or f"its last event has the text {text!r}, not {request.text!r}"
            return True
        self.history.saw(request)
        return False


async def _json_events(asked: Exchange) -> AsyncIterator[dict[str, Any]]:
    async for _, data in events_of(asked, SILENCE):
        if data != b"[DONE]":
            yield json.loads(data)
