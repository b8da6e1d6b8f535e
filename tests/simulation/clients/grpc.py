"""gRPC's ChatSession without HTTP/2 beneath it: a client, and what a gateway is asked by.

The session's own class serves it (`services/gateway/api/grpc/session.py`); messages cross the connection as frames.
"""

from typing import Any, ClassVar

import msgspec

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.session import ChatSession
from services.gateway.core.errors import ClientGone, describe, status_of
from shared.errors import RyzansteinError
from tests.simulation.clients.ask import Refused
from tests.simulation.clients.client import BACKGROUND
from tests.simulation.clients.history import Request
from tests.simulation.clients.sessions import Session
from tests.simulation.core.asgi import MORE, Event, Write

_FINISH = {1: "stop", 2: "length", 3: "tool_calls", 4: "function_call"}
_AGAIN = (4, 8, 14)  # gRPC's codes that say to try again: DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE


class GrpcClient(Session):
    kind: ClassVar[str] = "grpc"
    scope: ClassVar[str] = "grpc"
    path: ClassVar[str] = "/ryzanstein.v1.InferenceService/ChatSession"

    def asking(self, name: str, request: Request) -> Event:
        message = pb.ChatSessionRequest(id=name)
        if request.identity:
            message.attach.generation_id = request.identity
            if request.position != "":
                message.attach.position = request.position
            return {"bytes": message.SerializeToString()}
        body = request.body
        message.background_seconds = BACKGROUND
        message.chat.model = body["model"]
        (given,) = body["messages"]
        message.chat.messages.add(role=pb.ROLE_USER, content=given["content"])
        message.chat.sampling.seed = body["seed"]
        message.chat.sampling.max_tokens = body["max_tokens"]
        if body.get("logprobs"):
            message.chat.sampling.logprobs = 1
        return {"bytes": message.SerializeToString()}

    def cancelling(self, name: str) -> Event:
        message = pb.ChatSessionRequest(id=name, cancel=pb.CancelAction())
        return {"bytes": message.SerializeToString()}

    def decoded(self, event: Event) -> tuple[str, Any]:
        said = pb.ChatSessionResponse.FromString(event["bytes"])
        if said.HasField("done"):
            return said.id, None
        if said.HasField("error"):
            again = said.error.code in _AGAIN
            return said.id, Refused(503 if again else 400, str(said.error.code), said.error.message)
        return said.id, said.event

    def take(self, request: Request, found: Any) -> None:
        if found.id:
            request.called(found.id)
        request.position = found.position or request.position
        if found.HasField("usage"):
            request.usage = {"completion_tokens": found.usage.completion_tokens}
        for choice in found.choices:
            request.text += choice.text
            request.arrivals += bool(choice.text)
            request.last_arrival = self.around.now
            request.finish = _FINISH.get(choice.finish_reason, request.finish)
            request.logprobs += [{"token": one.token.decode(), "logprob": one.logprob} for one in choice.logprobs]


class _Call:
    """What a method of gRPC's server is given, as far as a session uses it."""

    def __init__(self, scope: Event, receive: Any, send: Any, write: Write) -> None:
        self._metadata = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._receive, self._send, self._write = receive, send, write
        self.principal: Any = None
        self.request_id = "req-grpc"
        self.deadline: float | None = None
        self.trailing: dict[str, str] = {}
        self._ended: BaseException | None = None
        self._on_end: Any = None

    def metadata(self, name: str) -> str | None:
        return self._metadata.get(name)

    def watch(self, on_end: Any) -> None:
        self._on_end = on_end

    async def receive(self) -> bytes | None:
        event = await self._receive()
        if event["type"] == "websocket.disconnect":
            self._ended = ClientGone()
            self._on_end(self._ended)
            raise self._ended
        return bytes(event["bytes"])

    async def send(self, message: bytes) -> None:
        if self._ended is not None:
            raise self._ended
        await self._send({"type": "websocket.send", "bytes": message})

    def write(self, message: bytes) -> bool:
        return self._ended is None and self._write({"type": "websocket.send", "bytes": message})


async def serve_grpc(app: Any, scope: Event, receive: Any, send: Any, write: Write) -> None:
    """A ChatSession at the gateway whose application this is."""
    await receive()
    backend = app._backend
    call = _Call(scope, receive, send, write)
    scheme, _, token = (call.metadata("authorization") or "").partition(" ")
    try:
        call.principal = backend.authenticator.authenticate(token if scheme.lower() == "bearer" else None)
        backend.check_draining()
    except RyzansteinError as error:
        body = msgspec.json.encode(describe(error, call.request_id))
        await send({"type": "websocket.http.response.start", "status": status_of(error), "headers": []})
        await send({"type": "websocket.http.response.body", "body": body})
        return
    await send({"type": "websocket.accept"})
    try:
        await ChatSession(call, backend).serve()  # type: ignore[arg-type]
    except ClientGone:
        return


MORE["grpc"] = serve_grpc
