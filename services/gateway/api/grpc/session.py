"""ChatSession: several generations at once on one stream, as on the WebSocket.

    client   chat | generate | attach, under an id of its choice ──▶
                                             ◀── event, 0 to n times, then done or error
             cancel ──▶                      ◀── done, cancelled

When the client ends its side, the generations go on to their ends; when it goes, they are left to whoever
attaches in time. Messages of all generations go through one stream with one window: what its reader does not
take is not made, for each generation waits for its own message to be sent.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.grpc import requests
from services.gateway.api.grpc.call import GrpcCall
from services.gateway.api.grpc.encoding import event, event_format, field, id_field
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.requests import decode
from services.gateway.api.grpc.status import status_message
from services.gateway.api.session import GenerationCancelled, InvalidSessionMessage, Session, Turn, check_name
from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import InvalidParameter, missing
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.headers import check_background, check_idempotency_key, check_session_id
from services.gateway.intake.record import Context
from services.gateway.streams import cursor
from services.gateway.streams.reading import View
from services.gateway.streams.stream_reader import StreamReader
from shared.errors import QueueFull

_NEED_KEY = (
    "Invalid '{}': a call resumes a generation only under the idempotency key that began it; send that too, or "
    "call Attach."
)


def context_of(call: GrpcCall, settings: GatewaySettings) -> Context:
    """Raises `InvalidParameter`."""
    key = check_idempotency_key(call.metadata("idempotency-key"))
    position = call.metadata("last-event-id")
    context = Context(
        call.request_id,
        check_session_id(call.metadata("x-session-id")),
        background=check_background(call.metadata("x-ryzanstein-background"), settings.background_limit),
        key=key,
        tenant=call.principal.tenant,
        principal=call.principal,
        answer_headers=call.trailing,
    )
    if call.deadline is not None:
        context.deadline = call.deadline
    take_position(context, position, "last-event-id")
    return context


def take_position(context: Context, position: str | None, name: str) -> None:
    """`context` becomes that of a reader who stands at `position`. Raises `InvalidParameter`."""
    if not position:
        return
    if not context.key:
        raise InvalidParameter(_NEED_KEY.format(name), param=name)
    context.after = cursor.parse(position, name)


REFUSED = b"\x28\x01"  # ChatSessionResponse.refused, encoded


# Whose idempotency keys they are: a key of one API stands for nothing in the other, whose requests look different.
CHAT, GENERATE = "grpc.Chat", "grpc.Generate"


def view_of(output: pb.OutputOptions) -> View:
    """How the client wants to see the answer, whichever API began it."""
    tokens = output.kind == pb.OUTPUT_KIND_TOKENS
    return partial(event_format, tokens=tokens, progress=output.return_progress)


def positions_of(given: pb.AttachRequest) -> list[int] | None:
    """Where the client stands. Raises `InvalidParameter`."""
    return cursor.parse(given.position, "position") if given.position else None


async def send_events(
    run: StreamReader,
    output: pb.OutputOptions,
    send: Callable[[bytes], Awaitable[None]],
    write: Callable[[bytes], bool],
) -> None:
    """The answer that `run` reads, as its client wants it; `write` sends at once where that is possible. Raises what
    ended it."""
    if output.whole:
        message = await run.collect()
        await send(message + field(2, run.position.encode()))
        return
    head = id_field(run.answer)

    def write_chunks(batch: Sequence[StreamChunk]) -> bool:
        return not head and write(event(b"", batch))

    async with contextlib.aclosing(run.chunks(write_chunks)) as chunks:
        async for batch in chunks:
            if shown := [chunk for chunk in batch if not chunk.comment]:
                await send(event(head, shown))
                head = b""


class ChatSession(Session[pb.ChatSessionRequest]):
    """Of one stream."""

    def __init__(self, call: GrpcCall, backend: GatewayBackend) -> None:
        """Raises `InvalidParameter`."""
        super().__init__(backend, context_of(call, backend.settings))
        self._call = call

    async def serve(self) -> None:
        """Until the client has ended its side and every generation has ended. Raises what ended the call."""
        self._call.watch(self.end)
        try:
            while (data := await self._call.receive()) is not None:
                await self._handle(decode(pb.ChatSessionRequest, data))
            await self.finished()
        finally:
            await self.close()

    async def _handle(self, message: pb.ChatSessionRequest) -> None:
        try:
            name, action = check_name(message.id), message.WhichOneof("action")
            if action is None:
                raise missing("action", "chat, generate, attach or cancel")
            if action == "cancel":
                self.cancel(name)
            else:
                self.begin(name, message)
        except (InvalidParameter, QueueFull) as error:
            await self.send_end(message.id, error)

    async def prepare(self, message: pb.ChatSessionRequest) -> StreamReader:
        view = view_of(_output(message))
        if message.HasField("attach"):
            given = message.attach
            after = positions_of(given)
            self._backend.authenticator.check(self._context.principal)
            return await self._backend.parts.reading.attach(
                given.generation_id, after, how="grpc", view=view, tenant=self._context.tenant
            )
        context = self._context_of(message)
        context.view = view
        await self._backend.parts.intake.large.turn(context.tenant, message.ByteSize())
        chat = message.HasField("chat")
        asked = message.chat if chat else message.generate
        print_ = requests.fingerprint(asked) if context.key else ""
        request = requests.chat_request(message.chat) if chat else requests.completion_request(message.generate)
        return await self._backend.parts.intake.prepare_decoded(CHAT if chat else GENERATE, request, context, print_)

    async def show(self, turn: Turn[pb.ChatSessionRequest], run: StreamReader) -> None:
        head = field(1, turn.name.encode())

        async def send(event: bytes) -> None:
            await self.send(head + field(2, event))

        def write(event: bytes) -> bool:
            return self.write([head + field(2, event)])

        await send_events(run, _output(turn.message), send, write)

    def _context_of(self, message: pb.ChatSessionRequest) -> Context:
        """The stream's, with what the message says of its own generation. Raises `InvalidParameter`."""
        changes: dict[str, object] = {"key": "", "after": None, "answer_headers": {}}
        if message.HasField("idempotency_key"):
            changes["key"] = check_idempotency_key(message.idempotency_key)
        if message.HasField("background_seconds"):
            shown = f"{message.background_seconds:.6f}"
            changes["background"] = check_background(shown, self._backend.settings.background_limit)
        if message.HasField("session_id"):
            changes["session"] = check_session_id(message.session_id)
        context = msgspec.structs.replace(self._context, **changes)
        take_position(context, message.position, "position")
        return context

    async def send_end(self, name: str | None, error: Exception | None) -> None:
        if error is None or isinstance(error, GenerationCancelled):
            done = pb.GenerationDone(cancelled=error is not None)
            shown = field(3, done.SerializeToString())
        else:
            shown = field(4, status_message(error, self._context.request_id).SerializeToString())
            shown += REFUSED if isinstance(error, InvalidSessionMessage) else b""
        await self.send(field(1, (name or "").encode()) + shown)

    def write_messages(self, messages: Sequence[bytes]) -> bool:
        [message] = messages
        return self._call.write(message)

    async def send_message(self, message: bytes) -> None:
        await self._call.send(message)


def _output(message: pb.ChatSessionRequest) -> pb.OutputOptions:
    if message.HasField("chat"):
        return message.chat.output
    return message.generate.output if message.HasField("generate") else message.attach.output
