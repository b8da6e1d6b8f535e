"""ChatSession: several generations at once on one stream, as on the WebSocket.

    client   chat | generate | attach, under an id of its choice ──▶
                                             ◀── event, 0 to n times, then done or error
             cancel ──▶                      ◀── done, cancelled

When the client ends its side, the generations go on to their ends; when it goes, they are left to whoever
attaches in time. Messages of all generations go through one stream with one window: what its reader does not
take is not made, for each generation waits for its own message to be sent.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from services.gateway.api.backend import Backend
from services.gateway.api.grpc import requests
from services.gateway.api.grpc.call import Call
from services.gateway.api.grpc.encoding import field
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.requests import EventView, decode
from services.gateway.api.grpc.status import status_message
from services.gateway.core.errors import ClientGone, InvalidParameter, log_failure
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.record import Context
from services.gateway.intake.validation import check_background, check_idempotency_key, check_session_id
from services.gateway.streams import cursor
from services.gateway.streams.run import Mailbox, Run
from shared.errors import DeadlineExceeded, QueueFull

_NEED_KEY = (
    "Invalid '{}': a call goes on with a generation only under the idempotency key that began it; send that too, or "
    "call Attach."
)


def context_of(call: Call, settings: GatewaySettings) -> Context:
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
    return at_position(with_deadline(context, call), position, "last-event-id")


def with_deadline(context: Context, call: Call) -> Context:
    """`context` with the call's deadline, where it has one."""
    return context if call.deadline is None else msgspec.structs.replace(context, deadline=call.deadline)


def at_position(context: Context, position: str | None, name: str) -> Context:
    """`context` for a reader that stands at `position`. Raises `InvalidParameter`."""
    if not position:
        return context
    if not context.key:
        raise InvalidParameter(_NEED_KEY.format(name), param=name, reason="invalid_value")
    return msgspec.structs.replace(context, after=cursor.parse(position, name))


REFUSED = b"\x28\x01"
"""ChatSessionResponse.refused, encoded."""


CHAT, GENERATE = "grpc.Chat", "grpc.Generate"
"""Whose idempotency keys they are: a key of one API stands for nothing in the other, whose requests look different."""


async def send_events(run: Run, view: EventView, send: Callable[[bytes], Awaitable[None]]) -> None:
    """The answer that `run` reads, as its client wants it. Raises what ended it."""
    shape = view.format
    assert shape is not None
    if view.whole:
        message = await run.collect()
        await send(message + field(2, run.position.encode()))
        return
    async with contextlib.aclosing(run.chunks()) as chunks:
        async for batch in chunks:
            await send(shape.event(batch))


class _Cancelled(Exception):
    """The client cancelled this generation."""


class _Refused(InvalidParameter):
    """A message that does not fit the state of the generation it names."""


class ChatSession:
    """The method; each stream is a `_Session`."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self._backend = backend
        self._settings = settings

    async def serve(self, call: Call) -> None:
        """Until the client has ended its side and every generation has ended."""
        context = context_of(call, self._settings)
        await _Session(call, self._backend, context, self._settings).serve()


class _Session:
    def __init__(self, call: Call, backend: Backend, context: Context, settings: GatewaySettings) -> None:
        self._call = call
        self._backend = backend
        self._context = context
        self._settings = settings
        self._sending = asyncio.Lock()
        self._mailboxes: dict[str, Mailbox | None] = {}
        """Unfinished generations by the client's name; None until the request is prepared."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Raises what ended the call."""
        try:
            while (data := await self._call.receive()) is not None:
                await self._handle(decode(pb.ChatSessionRequest, data))
            await self._until_ended()
        finally:
            for mailbox in self._mailboxes.values():
                if mailbox is not None:
                    mailbox.close(ClientGone())
            await self._until_ended()

    async def _until_ended(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _handle(self, message: pb.ChatSessionRequest) -> None:
        try:
            action = self._check(message)
            if action == "cancel":
                self._cancel(message.id)
            else:
                self._begin(message, action)
        except (InvalidParameter, QueueFull) as error:
            await self._send_error(message.id, error, refused=isinstance(error, _Refused))

    def _check(self, message: pb.ChatSessionRequest) -> str:
        if not 1 <= len(message.id) <= 64:
            raise InvalidParameter(
                "Invalid 'id': expected 1 to 64 characters.", param="id", reason="invalid_value"
            )
        action: str | None = message.WhichOneof("action")
        if action is None:
            raise InvalidParameter(
                "Missing required parameter: 'action'; send chat, generate, attach or cancel.",
                param="action",
                reason="missing_required_parameter",
            )
        return action

    def _begin(self, message: pb.ChatSessionRequest, action: str) -> None:
        if message.id in self._mailboxes:
            raise _Refused(
                f"Invalid 'id': '{message.id}' is the id of a generation that has not ended; choose another.",
                param="id",
                reason="duplicate_id",
            )
        if len(self._mailboxes) >= self._settings.max_generations_per_socket:
            raise QueueFull(
                f"This stream has {len(self._mailboxes)} generations in flight and may have no more; "
                "wait for one to end."
            )
        self._mailboxes[message.id] = None
        task = asyncio.create_task(self._generate(message, action))
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

    async def _generate(self, message: pb.ChatSessionRequest, action: str) -> None:
        """One generation, from its request to `done` or `error`."""
        error: Exception | None = None
        try:
            with self._backend.active():
                await self._run(message, action)
        except Exception as raised:
            error = raised
        finally:
            self._mailboxes.pop(message.id, None)
        if isinstance(error, ClientGone) or not self._call.alive:
            return
        with contextlib.suppress(ClientGone, DeadlineExceeded):
            await self._conclude(message.id, error)

    async def _conclude(self, identity: str, error: Exception | None) -> None:
        """The last message of a generation."""
        if error is not None and not isinstance(error, _Cancelled):
            log_failure(error)
            await self._send_error(identity, error)
            return
        done = pb.GenerationDone(cancelled=error is not None)
        await self._send(field(1, identity.encode()) + field(3, done.SerializeToString()))

    async def _run(self, message: pb.ChatSessionRequest, action: str) -> None:
        view = EventView(_output(message, action))
        run = await self._prepare(message, action, view)
        try:
            if self._mailboxes[message.id] is not None:  # cancelled while it was tokenized
                raise _Cancelled
            self._mailboxes[message.id] = run.mailbox
            self._call.watch(run.mailbox)
            await run.begin()
            head = field(1, message.id.encode())

            async def send(event: bytes) -> None:
                await self._send(head + field(2, event))

            await send_events(run, view, send)
        except _Cancelled:
            run.cancel()
            raise
        finally:
            self._call.unwatch(run.mailbox)
            run.close()

    async def _prepare(self, message: pb.ChatSessionRequest, action: str, view: EventView) -> Run:
        self._backend.check_draining()
        if action == "attach":
            given = message.attach
            after = cursor.parse(given.position, "position") if given.position else None
            self._backend.authenticator.check(self._context.principal)
            return await self._backend.reading.attach(
                given.generation_id, after, how="grpc", view=view, tenant=self._context.tenant
            )
        intake = self._backend.intake
        context = msgspec.structs.replace(self._context_of(message), view=view)
        if action == "chat":
            print_ = requests.fingerprint(message.chat) if context.key else ""
            return await intake.prepare_decoded(CHAT, requests.chat_request(message.chat), context, print_)
        print_ = requests.fingerprint(message.generate) if context.key else ""
        return await intake.prepare_decoded(
            GENERATE, requests.completion_request(message.generate), context, print_
        )

    def _context_of(self, message: pb.ChatSessionRequest) -> Context:
        """The stream's, with what the message says of its own generation. Raises `InvalidParameter`."""
        changes: dict[str, object] = {"key": "", "after": None, "answer_headers": {}}
        if message.HasField("idempotency_key"):
            changes["key"] = check_idempotency_key(message.idempotency_key)
        if message.HasField("background_seconds"):
            shown = f"{message.background_seconds:.6f}"
            changes["background"] = check_background(shown, self._settings.background_limit)
        if message.HasField("session_id"):
            changes["session"] = check_session_id(message.session_id)
        context = msgspec.structs.replace(self._context, **changes)
        return at_position(context, message.position, "position")

    async def _send_error(self, identity: str, error: BaseException, *, refused: bool = False) -> None:
        shown = field(4, status_message(error, self._context.request_id).SerializeToString())
        await self._send(field(1, identity.encode()) + (shown + REFUSED if refused else shown))

    async def _send(self, response: bytes) -> None:
        """One message at a time, so that what waits for the reader is one message."""
        async with self._sending:
            await self._call.send(response)


def _output(message: pb.ChatSessionRequest, action: str) -> pb.OutputOptions:
    if action == "chat":
        return message.chat.output
    return message.generate.output if action == "generate" else message.attach.output
