"""Clients with several generations on one connection.

A connection that breaks leaves its generations behind: they are attached at the next gateway where their ids are
known, and asked for anew where they are not.
"""

import json
from typing import Any, ClassVar

from tests.simulation.clients.ask import Lost, Refused, next_event, refusal
from tests.simulation.clients.client import BACKGROUND, Client, take_chunk
from tests.simulation.clients.history import Request, Try
from tests.simulation.core.asgi import Event, Exchange


class Session(Client):
    """Its generations are named by their numbers."""

    scope: ClassVar[str]
    path: ClassVar[str]
    _token = ""  # the key of its connection

    async def once(self) -> None:
        count = self.draw.randint(1, min(8, self.plan.size[1]))
        requests = [self.request(*self.chat(may_stop=False)) for _ in range(count)]
        while going := [one for one in requests if one.outcome == "open"]:
            tries = [Try(self.around.now, "", resumes=bool(one.identity)) for one in going]
            for request, tried in zip(going, tries, strict=True):
                request.tries.append(tried)
            wait, self._token = 0.0, self.around.token
            try:
                gateway = self.around.gateway()
                for tried in tries:
                    tried.gateway = gateway
                await self._connected(gateway, going)
            except Lost:
                pass
            except Refused as error:  # the handshake was
                wait = error.retry_after
                for request, tried in zip(going, tries, strict=True):
                    self._refused(request, tried, error)
            for request, tried in zip(going, tries, strict=True):
                tried.ending = tried.ending or ("ended" if request.outcome != "open" else "lost")
                tried.until = self.around.now
                self.history.saw(request)
            if any(one.outcome == "open" for one in going):
                await self.around.pause(wait)

    async def _connected(self, gateway: str, going: list[Request]) -> None:
        """Until all of them have ended, or were refused for now. Raises `Lost`, `Refused`."""
        headers = [(b"host", b"localhost")]
        if self.around.token:
            headers.append((b"authorization", f"Bearer {self.around.token}".encode()))
        scope = {"type": self.scope, "path": self.path, "query_string": b"", "headers": headers}
        async with Exchange(gateway, scope, {"type": "websocket.connect"}) as socket:
            await _accepted(socket)
            waiting = dict(enumerate(going))
            for name, request in waiting.items():
                if not request.identity:
                    request.begin_again()
                await self._send(socket, self.asking(str(name), request))
            while waiting:
                await self._take(socket, waiting)

    async def _take(self, socket: Exchange, waiting: dict[int, Request]) -> None:
        """One message."""
        name, found = self.decoded(await self._message(socket))
        request = waiting.get(int(name))
        if request is None:
            late = isinstance(found, Refused) and found.code in ("unknown_id", "3")
            if not late:  # it was cancelled when it had just ended, and both messages met on their way
                self.wrong(f"a message for {name!r} came, which had ended: {found}")
            return
        if isinstance(found, Refused):
            del waiting[int(name)]
            self._refused(request, request.tries[-1], found)
            return
        if found is None:
            del waiting[int(name)]
            cancelled = request.cancel_asked and request.finish != request.wanted.finish
            self.history.ended(request, "cancelled" if cancelled else "answered", self.around.now)
            return
        self.take(request, found)
        self.history.saw(request)
        if not request.cancel_asked and self.draw.random() < 0.002:
            request.cancel_asked = True
            await self._send(socket, self.cancelling(name))

    def _refused(self, request: Request, tried: Try, error: Refused) -> None:
        tried.ending, tried.status, tried.code = "refused", error.status, error.code
        tried.replaced = self.around.replaced(self._token, error)
        if not (error.again or tried.replaced):
            self.end_refused(request, error)

    async def _message(self, socket: Exchange) -> Event:
        event = await next_event(socket)
        if event["type"] == "websocket.close":
            raise Lost(f"it was closed with {event.get('code')} {event.get('reason')}")
        return event

    async def _send(self, socket: Exchange, message: Any) -> None:
        await socket.send({"type": "websocket.receive", **message})

    # --- of each protocol ------------------------------------------------------------------------

    def asking(self, name: str, request: Request) -> Event:
        """The message that asks for it, or for the rest of it."""
        raise NotImplementedError

    def cancelling(self, name: str) -> Event:
        raise NotImplementedError

    def decoded(self, event: Event) -> tuple[str, Any]:
        """The generation's name; and what came of it: None at its end, a `Refused`, or what `take` takes."""
        raise NotImplementedError

    def take(self, request: Request, found: Any) -> None:
        raise NotImplementedError


async def _accepted(socket: Exchange) -> None:
    """Raises `Lost`, `Refused`."""
    event = await next_event(socket)
    if event["type"] == "websocket.http.response.start":
        body = (await next_event(socket)).get("body", b"{}")
        error = json.loads(body)["error"]
        raise Refused(event["status"], str(error["code"]), str(error["message"]))
    if event["type"] != "websocket.accept":
        raise Lost(f"it was not accepted: {event.get('reason')}")


class WebSocketClient(Session):
    kind: ClassVar[str] = "websocket"
    scope: ClassVar[str] = "websocket"
    path: ClassVar[str] = "/v1/stream"

    def asking(self, name: str, request: Request) -> Event:
        message: dict[str, Any] = {"type": "generate", "id": name, "request": request.body}
        if request.identity:
            message = {"type": "attach", "id": name, "generation": request.identity}
            message |= {"position": request.position} if request.position != "" else {}
        else:
            message["background"] = BACKGROUND
        return {"text": json.dumps(message)}

    def cancelling(self, name: str) -> Event:
        return {"text": json.dumps({"type": "cancel", "id": name})}

    def decoded(self, event: Event) -> tuple[str, Any]:
        said = json.loads(event["text"])
        if said["type"] == "done":
            return said["id"], None
        return said["id"], refusal(said["error"]) if said["type"] == "error" else said

    def take(self, request: Request, found: Any) -> None:
        take_chunk(request, found["chunk"])
        request.position = found.get("position", request.position)
