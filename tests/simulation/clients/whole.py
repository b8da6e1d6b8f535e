"""Clients that wait for whole answers, and what they do about those that do not come.

whole          sends again under its idempotency key
keyed          the same request under one key at several gateways, at the very same time or soon after each other; then
               with another body
conversation   turns of one session, each with the answers before it
stored         responses and chats that the API keeps: read later, deleted sometimes
limited        more than its key's limits allow: 429 is an answer
"""

import asyncio
from functools import partial
from typing import Any, ClassVar

from tests.simulation.clients.ask import Lost, Refused
from tests.simulation.clients.client import Client, take_response, take_whole
from tests.simulation.clients.history import Kept, Request, Try, Wanted
from tests.simulation.clients.streams import CHAT, RESPONSES


class Whole(Client):
    kind: ClassVar[str] = "whole"

    async def once(self) -> None:
        await self.answered(self.request(*self.chat(), self.fresh_key()))

    async def answered(self, request: Request) -> bool:
        """Whether it is; else it was refused for good."""
        return await self.until_answered(request, lambda gateway, tried: self.send(gateway, request))

    def fresh_key(self) -> str:
        return f"{self.name}-{self._number}-{self.draw.getrandbits(48):x}"

    async def send(
        self, gateway: str, request: Request, headers: dict[str, str] | None = None, path: str = CHAT
    ) -> None:
        """Raises `Lost`, `Refused`."""
        given = {"Idempotency-Key": request.key} if request.key else {}
        if not request.key:
            request.begin_again()
        reply = await self.around.ask(gateway, "POST", path, request.body, given | (headers or {}))
        take_whole(request, reply.json())


class Keyed(Whole):
    """Whoever is first generates; the others get the same answer under the same id."""

    kind: ClassVar[str] = "keyed"

    async def once(self) -> None:
        body, wanted = self.chat()
        key = self.fresh_key()
        count = self.draw.randint(2, 4)
        requests = [self.request(body, wanted, key) for _ in range(count)]
        shared: set[str] = set()
        for request in requests:
            request.identities = shared  # one key, one generation
        spread = self.draw.choice((0.0, 1.0))
        await asyncio.gather(*(self._later(request, self.draw.uniform(0, spread)) for request in requests))
        if self.draw.random() < 0.3:
            await self._changed(body, key)

    async def _later(self, request: Request, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.answered(request)

    async def _changed(self, body: dict[str, Any], key: str) -> None:
        """The same key for something else is a mistake, and is told so."""
        other = {**body, "seed": self.seed()}
        request = self.request(other, Wanted("", 0, refusal="idempotency_key_reused"), key)
        await self.answered(request)
        if request.outcome == "answered":
            request.fault = "its idempotency key had been used with another body, and it was answered"


class Conversation(Whole):
    """Sticky: every turn goes back to the group that has its KV cache."""

    kind: ClassVar[str] = "conversation"

    async def once(self) -> None:
        session = f"{self.name}-{self._number}"
        messages: list[dict[str, str]] = []
        for _ in range(self.draw.randint(1, max(1, min(6, self.plan.size[1])))):
            messages.append({"role": "user", "content": self.words()})
            body, wanted = self.drawn(self.seed(), may_stop=False)
            request = self.request({**body, "messages": list(messages)}, wanted, self.fresh_key())
            answered = await self.until_answered(request, partial(self._turn, request, session))
            if not answered or self.around.stopping():
                return
            messages.append({"role": "assistant", "content": request.text})
            await asyncio.sleep(self.draw.uniform(*self.plan.wait))

    async def _turn(self, request: Request, session: str, gateway: str, tried: Try) -> None:
        await self.send(gateway, request, {"X-Session-ID": session})


class Stored(Whole):
    """What was acknowledged is there afterwards; what was deleted is not."""

    kind: ClassVar[str] = "stored"

    async def once(self) -> None:
        if self.draw.random() < 0.5:
            await self._chat()
        else:
            await self._response()

    async def _chat(self) -> None:
        body, wanted = self.chat(may_stop=False)
        request = self.request({**body, "store": True}, wanted, self.fresh_key())
        if await self.answered(request):
            await self._keep("chat", f"{CHAT}/{request.identity}", request.identity, request.tries[-1].gateway)

    async def _response(self) -> None:
        body, wanted = self.response()
        conversation = await self._conversation() if self.draw.random() < 0.5 else ""
        more = {"conversation": conversation} if conversation else {}
        request = self.request({**body, **more}, wanted, self.fresh_key())
        if not await self.until_answered(request, lambda gateway, tried: self._respond(gateway, request)):
            return
        gateway = request.tries[-1].gateway
        await self._keep("response", f"{RESPONSES}/{request.identity}", request.identity, gateway)

    async def _respond(self, gateway: str, request: Request) -> None:
        headers = {"Idempotency-Key": request.key}
        shown = (await self.around.ask(gateway, "POST", RESPONSES, request.body, headers)).json()
        request.text = take_response(request, shown)

    async def _conversation(self) -> str:
        reply, gateway = await self.around.insist("POST", "/v1/conversations", {})
        identity = str(reply.json()["id"])
        self.acknowledged("conversation", identity, gateway)
        return identity

    async def _keep(self, what: Kept, path: str, identity: str, gateway: str) -> None:
        known = self.acknowledged(what, identity, gateway)
        if self.draw.random() < 0.2:
            await asyncio.sleep(self.draw.uniform(0, 10.0))
            try:
                await self.around.insist("DELETE", path)
                known.gone_at = self.around.now
            except Refused as error:
                if error.status != 404:
                    self.wrong(f"{path} could not be deleted: {error}")
                known.gone_at = self.around.now  # an earlier try may have done it


class Limited(Whole):
    """Asks for more than it may: bursts, whose 429 are answers that say when to come again."""

    kind: ClassVar[str] = "limited"

    async def once(self) -> None:
        burst = self.draw.randint(2, max(2, min(20, self.plan.size[1])))
        await asyncio.gather(*(self._one() for _ in range(burst)))

    async def _one(self) -> None:
        await self.answered(self.request(*self.chat(may_stop=False), self.fresh_key()))


class Probing(Client):
    """Asks each gateway in turn with a key, until it is told that the key holds no more; records what it saw."""

    kind: ClassVar[str] = "probing"

    async def once(self) -> None:
        for gateway in list(self.around.gateways()):
            tried = Try(self.around.now, gateway)
            try:
                await self.around.ask(gateway, "GET", "/v1/models")
                tried.status = 200
            except Refused as error:
                tried.status = error.status
            except Lost:
                continue
            self.answered(tried)

    def answered(self, tried: Try) -> None:
        """What a gateway has said to a request sent at `tried.at`. One that answers nobody (503) says nothing of it."""
        for key in self.history.keys:
            said = tried.status < 500 and tried.status != 429
            if said and key.identity in self.around.token and tried.at >= key.revoked_at:
                seen = key.refused if tried.status == 401 else key.accepted
                seen.append((tried.at, tried.gateway))
