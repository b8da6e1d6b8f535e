"""/v1/stream: several generations at once on one WebSocket connection.

Every message is one JSON object in a text frame (binary frames with the same content are read too).

    client                                                                    server
    {"type": "generate", "id": "a", "endpoint": "chat.completions",
     "request": {...}}                                             ──▶
                                     ◀── {"type": "chunk", "id": "a", "position": 3, "chunk": {...}}  0 to n times
                                     ◀── {"type": "done", "id": "a"}
    {"type": "attach", "id": "b", "generation": "chatcmpl-...",
     "position": 3}                                                ──▶   as after generate
    {"type": "cancel", "id": "a"}                                  ──▶
                                     ◀── {"type": "done", "id": "a", "cancelled": true}
    {"type": "ping"}                                               ──▶
                                     ◀── {"type": "pong"}
                                     ◀── {"type": "error", "id": "a", "error": {...}}

- `id` is the client's name for a generation, 1 to 64 characters, unique among those that have not ended.
- `endpoint` is `chat.completions` (the default), `completions`, `responses` or `messages`, and `request` is the body
  that the REST endpoint of that name takes. It is always streamed: `stream` may be left out, and false is refused.
- `chunk` is the endpoint's streaming chunk; the `id` in it names the generation to every gateway.
  `position` is where its reader stands, see `cursor.py`: a number, or an array with one for each choice. Of a
  response it is the number of the event.
- `attach` goes on with a generation of any connection or gateway behind `position`; without it, from the
  beginning. `generate` takes `idempotency_key`, `background` (seconds) and, with a key, `position`; both take
  `traceparent` and `tracestate`.
- Each generation ends with exactly one `done` or `error`; after it its id is free again. `error` is
  OpenAI's error object. An error with `id` null is about a message that could not be understood. The
  connection stays open after any error.
- An error with `"refused": true` is about a message (an id that is in use, the cancelling of an unknown
  id), not about the generation of that id: that one goes on.
- Closing the connection leaves its generations to whoever attaches in time, then they are cancelled. The
  headers X-Session-ID and x-request-id of the handshake hold for all of its generations.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from services.gateway.api.backend import GatewayBackend, RouteMaker
from services.gateway.api.session import GenerationCancelled, InvalidSessionMessage, Session, Turn, check_name
from services.gateway.core.asgi import StreamChunk, header, message_writer
from services.gateway.core.errors import ClientGone, InvalidField, InvalidParameter, describe, missing, status_of
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import check_background, check_flag, check_idempotency_key, check_session_id
from services.gateway.intake.record import Context
from services.gateway.streams import cursor
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tracing.requests import begin_message, handshake_context
from shared import tracing
from shared.errors import QueueFull
from shared.service.endpoints import Receive, Scope, Send
from shared.tracing import TraceContext

ROUTE = "/v1/stream"  # as metrics name it


class ClientMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Any message of a client."""

    type: Literal["generate", "attach", "cancel", "ping"]
    id: str = ""
    endpoint: str = "chat.completions"
    request: msgspec.Raw = msgspec.Raw()
    generation: str = ""
    position: int | list[int] | None = None
    idempotency_key: str | None = None
    background: float | None = None
    # W3C Trace Context of this generation; what is none is ignored, as the handshake's header is.
    traceparent: Any = None
    tracestate: Any = None


_decoder = msgspec.json.Decoder(ClientMessage)
_encode = msgspec.json.encode


class _StreamSocket:
    def __init__(self, backend: GatewayBackend, kind: "type[WebSocketSession]") -> None:
        self._kind = kind
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        context = Context(
            scope["state"]["request_id"],
            check_session_id(header(scope, b"x-session-id")),
            tenant=scope["state"]["principal"].tenant,
            principal=scope["state"]["principal"],
            return_progress=check_flag(header(scope, b"x-ryzanstein-progress"), "X-Ryzanstein-Progress"),
        )
        await socket.accept()
        await self._kind(socket, self._backend, context).serve()


def socket_routes(path: str, kind: "type[WebSocketSession]") -> RouteMaker:
    """Makes a route whose connections are of that `kind`."""
    return lambda backend: [WebSocketRoute(path, _StreamSocket(backend, kind))]


class WebSocketSession(Session[ClientMessage]):
    """Of one client."""

    route = ROUTE

    def __init__(self, socket: WebSocket, backend: GatewayBackend, context: Context) -> None:
        super().__init__(backend, context)
        self._socket = socket
        self._write_messages = message_writer(socket.scope)
        # The trace that the handshake names.
        self._handshake: TraceContext | None = handshake_context(socket.scope)

    async def serve(self) -> None:
        """Until the client closes."""
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                await self.handle(message.get("text") or message.get("bytes") or "")
        except ClientGone:
            pass
        finally:
            await self.close()

    async def handle(self, text: str | bytes) -> None:
        """One message of the client."""
        try:
            message = decode(text.encode() if isinstance(text, str) else text, _decoder)
            if message.type == "ping":
                await self.send(b'{"type":"pong"}')
            elif message.type == "cancel":
                self.cancel(check_name(message.id))
            else:
                _check(message)
                self.begin(check_name(message.id), message)
        except (InvalidParameter, QueueFull) as error:
            await self.send_end(_id_in(text), error)

    async def show(self, turn: Turn[ClientMessage], run: StreamReader) -> None:
        framed = self.framing(turn.name)

        def messages(batch: Sequence[StreamChunk]) -> list[bytes]:
            """Without comments: who wants to know has asked for chunks that tell it."""
            return [framed(chunk) for chunk in batch if not chunk.comment]

        async with contextlib.aclosing(run.chunks(lambda batch: self.write(messages(batch)))) as chunks:
            async for batch in chunks:
                for message in messages(batch):
                    await self.send(message)

    def framing(self, name: str) -> Callable[[StreamChunk], bytes]:
        """What makes messages of the chunks of a generation."""
        head = b'{"type":"chunk","id":' + _encode(name) + b',"position":'

        def framed(chunk: StreamChunk) -> bytes:
            place = b"[%b]" % chunk.position if b"," in chunk.position else chunk.position or b"null"
            return b'%b%b,"chunk":%b}' % (head, place, chunk.data)

        return framed

    async def prepare(self, message: ClientMessage) -> StreamReader:
        position = message.position
        after = [position] if isinstance(position, int) else position
        if after is not None:
            cursor.parse(",".join(map(str, after)), "position")
        if message.type == "attach":
            self._backend.authenticator.check(self._context.principal)
            tenant = self._context.tenant
            return await self._backend.parts.reading.attach(message.generation, after, how="websocket", tenant=tenant)
        context = msgspec.structs.replace(
            self._context,
            background=check_background(
                None if message.background is None else f"{message.background:f}",
                self._backend.settings.background_limit,
            ),
            key=check_idempotency_key(message.idempotency_key),
            after=after,
        )
        if after is not None and not context.key:
            raise InvalidField(
                "position",
                "a new generation has none; attach to resume one, or send its idempotency_key.",
                reason="invalid_position",
            )
        intake = self._backend.parts.intake
        if not intake.serves(message.endpoint):
            raise InvalidField("endpoint", f"{message.endpoint!r} is not served here.")
        return await intake.prepare(message.endpoint, message.request, context, always_streamed=True)

    @contextlib.contextmanager
    def traced(self, message: ClientMessage) -> Iterator[None]:
        if not tracing.on():
            yield
            return
        with begin_message(message, self._handshake, self._context.request_id) as span, tracing.active(span):
            yield

    def count(self, turn: Turn[ClientMessage], error: Exception | None) -> None:
        """As a request of its own."""
        if turn.message.type != "generate":
            return
        status = 200 if error is None else status_of(ClientGone() if isinstance(error, GenerationCancelled) else error)
        model = turn.run.model if turn.run else ""
        self._backend.metrics.answered(self.route, model, status, time.perf_counter() - turn.began, error)

    async def send_end(self, name: str | None, error: Exception | None) -> None:
        message: dict[str, Any] = {"type": "done", "id": name}
        if isinstance(error, GenerationCancelled):
            message["cancelled"] = True
        elif error is not None:
            detail = describe(error, self._context.request_id).error
            message |= {"type": "error", "error": detail}
            message |= {"refused": True} if isinstance(error, InvalidSessionMessage) else {}
        await self.send(_encode(message))

    def write_messages(self, messages: Sequence[bytes]) -> bool:
        return self._write_messages is not None and self._write_messages(messages)

    async def send_message(self, message: bytes) -> None:
        """Waits for a client that reads slowly."""
        if self._socket.application_state is WebSocketState.DISCONNECTED:
            raise ClientGone  # another generation's message has found it so
        try:
            await self._socket.send({"type": "websocket.send", "text": message.decode()})
        except WebSocketDisconnect:
            raise ClientGone from None


def _check(message: ClientMessage) -> None:
    """Raises `InvalidParameter` where it lacks what it names its generation by."""
    needed = "generation" if message.type == "attach" else "request"
    if not (message.generation if message.type == "attach" else bytes(message.request)):
        raise missing(needed)


def _id_in(text: str | bytes) -> str | None:
    """The id in a message that is wrong otherwise: its sender waits for an answer under it."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError):
        return _named.decode(text).id
    return None


class _Named(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


_named = msgspec.json.Decoder(_Named)
