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
- `endpoint` is `chat.completions` (the default), `completions` or `responses`, and `request` is the body that the
  REST endpoint of that name takes. It is always streamed: `stream` may be left out, and false is refused.
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

import asyncio
import contextlib
import time
from typing import Any, Literal

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from services.gateway.api.backend import Backend
from services.gateway.core.asgi import header
from services.gateway.core.errors import ClientGone, InvalidParameter, describe, log_failure, status_of
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.intake import Endpoint
from services.gateway.intake.record import Context
from services.gateway.intake.validation import (
    check_background,
    check_idempotency_key,
    check_session_id,
    decode,
)
from services.gateway.streams import cursor
from services.gateway.streams.run import Mailbox, Run
from services.gateway.tracing.requests import begin_message, handshake_context
from shared import tracing
from shared.errors import QueueFull
from shared.service.endpoints import Receive, Scope, Send
from shared.tracing import Span, TraceContext

ROUTE = "/v1/stream"
"""As metrics name it."""
CLIENT_GONE = 499
"""As of requests whose client gave up."""


class ClientMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Any message of a client."""

    type: Literal["generate", "attach", "cancel", "ping"]
    id: str = ""
    endpoint: Endpoint = "chat.completions"
    request: msgspec.Raw = msgspec.Raw()
    generation: str = ""
    position: int | list[int] | None = None
    idempotency_key: str | None = None
    background: float | None = None
    traceparent: Any = None
    """W3C Trace Context of this generation; what is none is ignored, as the handshake's header is."""
    tracestate: Any = None


_decoder = msgspec.json.Decoder(ClientMessage)
_encode = msgspec.json.encode


class StreamSocket:
    """The route; each connection is a `_Connection`."""

    def __init__(self, backend: Backend, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        context = Context(
            scope["state"]["request_id"],
            check_session_id(header(scope, b"x-session-id")),
            tenant=scope["state"]["principal"].tenant,
            principal=scope["state"]["principal"],
        )
        await socket.accept()
        connection = _Connection(socket, self._backend, context, self._settings, self._metrics)
        connection.handshake = handshake_context(scope)
        await connection.serve()


class _Account:
    """What is counted of one generation, as a request of its own."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self.model = ""
        self.status = CLIENT_GONE
        """Until it has ended in some other way."""

    def close(self) -> None:
        self._metrics.requests.labels(ROUTE, self.model, self.status).inc()
        self._metrics.duration.labels(ROUTE).observe(time.perf_counter() - self._began)


class _Cancelled(Exception):
    """The client cancelled this generation."""


class _Refused(InvalidParameter):
    """A message that does not fit the state of the generation it names."""


class _Connection:
    def __init__(
        self,
        socket: WebSocket,
        backend: Backend,
        context: Context,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
    ) -> None:
        self._metrics = metrics
        self._socket = socket
        self._backend = backend
        self._context = context
        self._settings = settings
        self._max_generations = settings.max_generations_per_socket
        self._sending = asyncio.Lock()
        self._mailboxes: dict[str, Mailbox | None] = {}
        """Unfinished generations by the client's name; None until the request is prepared."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.handshake: TraceContext | None = None
        """The trace that the handshake names."""

    async def serve(self) -> None:
        """Until the client closes."""
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                await self._handle(message.get("text") or message.get("bytes") or "")
        except WebSocketDisconnect:
            pass
        finally:
            await self._cancel_all()

    async def _handle(self, text: str | bytes) -> None:
        identity = None
        try:
            body = text.encode() if isinstance(text, str) else text
            message = decode(body, _decoder)
            if message.type == "ping":
                await self._send(b'{"type":"pong"}')
                return
            identity = self._check_id(message)
            if message.type in ("generate", "attach"):
                self._begin(message)
            else:
                self._cancel(message.id)
        except (InvalidParameter, QueueFull) as error:
            await self._send_error(identity or _id_in(text), error)

    def _check_id(self, message: ClientMessage) -> str:
        if not 1 <= len(message.id) <= 64:
            raise InvalidParameter(
                "Invalid 'id': expected 1 to 64 characters.", param="id", reason="invalid_value"
            )
        return message.id

    def _begin(self, message: ClientMessage) -> None:
        if message.id in self._mailboxes:
            raise _Refused(
                f"Invalid 'id': '{message.id}' is the id of a generation that has not ended; choose another.",
                param="id",
                reason="duplicate_id",
            )
        if message.type == "attach" and not message.generation:
            raise InvalidParameter(
                "Missing required parameter: 'generation'.",
                param="generation",
                reason="missing_required_parameter",
            )
        if message.type == "generate" and not bytes(message.request):
            raise InvalidParameter(
                "Missing required parameter: 'request'.", param="request", reason="missing_required_parameter"
            )
        if len(self._mailboxes) >= self._max_generations:
            raise QueueFull(
                f"This connection has {len(self._mailboxes)} generations in flight and may have no more; "
                "wait for one to end."
            )
        self._mailboxes[message.id] = None
        task = asyncio.create_task(self._generate(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, identity: str) -> None:
        if identity not in self._mailboxes:
            raise _Refused(
                f"Invalid 'id': no generation '{identity}' is under way.", param="id", reason="unknown_id"
            )
        mailbox = self._mailboxes[identity]
        if mailbox is None:
            mailbox = self._mailboxes[identity] = Mailbox()
        mailbox.close(_Cancelled())

    async def _generate(self, message: ClientMessage) -> None:
        """One generation, from its request to `done` or `error`."""
        last: dict[str, Any] = {"type": "done", "id": message.id}
        account = _Account(self._metrics)
        try:
            with self._backend.active(), self._span(message) as span, tracing.active(span):
                await self._run(message, account)
            account.status = 200
        except _Cancelled:
            last["cancelled"] = True
        except (ClientGone, WebSocketDisconnect):
            return
        except Exception as error:
            log_failure(error)
            last = self._error(message.id, error)
            account.status = status_of(error)
        finally:
            self._mailboxes.pop(message.id, None)
            if message.type == "generate":
                account.close()
        with contextlib.suppress(WebSocketDisconnect):
            await self._send(_encode(last))

    def _span(self, message: ClientMessage) -> Span:
        if not tracing.on():
            return tracing.NONE
        return begin_message(message, self.handshake, self._context.request_id)

    async def _run(self, message: ClientMessage, account: "_Account") -> None:
        run = await self._prepare(message)
        account.model = run.model
        try:
            if self._mailboxes[message.id] is not None:  # cancelled while it was tokenized
                raise _Cancelled
            self._mailboxes[message.id] = run.mailbox
            await run.begin()
            head = b'{"type":"chunk","id":' + _encode(message.id) + b',"position":'
            async with contextlib.aclosing(run.chunks()) as chunks:
                async for batch in chunks:
                    for chunk in batch:
                        place = b"[%b]" % chunk.position if b"," in chunk.position else chunk.position
                        await self._send(head + place + b',"chunk":' + chunk.data + b"}")
        except _Cancelled:
            run.cancel()
            raise
        finally:
            run.close()

    async def _prepare(self, message: ClientMessage) -> Run:
        position = message.position
        after = [position] if isinstance(position, int) else position
        if after is not None:
            cursor.parse(",".join(map(str, after)), "position")
        self._backend.check_draining()
        if message.type == "attach":
            self._backend.authenticator.check(self._context.principal)
            tenant = self._context.tenant
            return await self._backend.reading.attach(
                message.generation, after, how="websocket", tenant=tenant
            )
        context = msgspec.structs.replace(
            self._context,
            background=_background(message, self._settings.background_limit),
            key=check_idempotency_key(message.idempotency_key),
            after=after,
        )
        if after is not None and not context.key:
            raise InvalidParameter(
                "Invalid 'position': a generation begins at its beginning; attach to go on with one, or send its "
                "idempotency_key.",
                param="position",
                reason="invalid_position",
            )
        return await self._backend.intake.prepare(
            message.endpoint, message.request, context, always_streamed=True
        )

    async def _cancel_all(self) -> None:
        for mailbox in self._mailboxes.values():
            if mailbox is not None:
                mailbox.close(ClientGone())
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_error(self, identity: str | None, error: Exception) -> None:
        await self._send(_encode(self._error(identity, error)))

    def _error(self, identity: str | None, error: Exception) -> dict[str, Any]:
        detail = describe(error, self._context.request_id).error
        message: dict[str, Any] = {"type": "error", "id": identity, "error": detail}
        return message | {"refused": True} if isinstance(error, _Refused) else message

    async def _send(self, message: bytes) -> None:
        """One at a time; waits for a client that reads slowly."""
        async with self._sending:
            if self._socket.application_state is WebSocketState.DISCONNECTED:
                raise WebSocketDisconnect  # another generation's message has found it so
            await self._socket.send({"type": "websocket.send", "text": message.decode()})


def _background(message: ClientMessage, limit: float) -> float:
    return 0.0 if message.background is None else check_background(f"{message.background:f}", limit)


def _id_in(text: str | bytes) -> str | None:
    """The id in a message that is wrong otherwise: its sender waits for an answer under it."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError):
        match msgspec.json.decode(text):
            case {"id": str(identity)} if 1 <= len(identity) <= 64:
                return identity
    return None
