"""Several generations at once on one connection, each under a name of its client's choice.

    begin, name a ──▶ prepared ──▶ shown, message by message ──▶ done, or an error
    cancel, name a ──────────────────▶ done, cancelled
    connection closed ──▶ left to whoever attaches in time

A session decides what may begin and what ends; its transport (WebSocket, gRPC) decodes messages, prepares the run that
one asks for, and encodes what is sent. Messages go out one at a time, so a client that reads slowly holds back its
generations, and nothing of them is made ahead.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from services.gateway.api.backend import GatewayBackend
from services.gateway.core.errors import ClientGone, InvalidField, log_failure
from services.gateway.intake.record import Context
from services.gateway.streams.stream_reader import StreamReader
from shared.errors import DeadlineExceeded, QueueFull
from shared.tasks import TaskSet

MessageT = TypeVar("MessageT")


class GenerationCancelled(Exception):
    """The client cancelled this generation."""


class InvalidSessionMessage(InvalidField):
    """A message that does not fit the state of the generation it names, which goes on."""


class Turn(Generic[MessageT]):
    """One generation, from the message that asks for it to its end."""

    def __init__(self, name: str, message: MessageT) -> None:
        self.name = name
        self.message = message
        self.began = time.perf_counter()
        self.run: StreamReader | None = None  # None until the request is prepared
        self.ended: BaseException | None = None  # why it ends before its answer does
        self._preparing: asyncio.Task[object] | None = None

    def end(self, reason: BaseException) -> None:
        self.ended = reason
        if self.run is not None:
            self.run.end(reason)
        elif self._preparing is not None:
            self._preparing.cancel()

    async def prepared(self, making: Awaitable[StreamReader]) -> StreamReader:
        """What `making` makes, which may wait for its model. Raises what it was ended with meanwhile."""
        task = self._preparing = asyncio.current_task()
        try:
            return await making
        except asyncio.CancelledError:
            if self.ended is None or task is None or task.uncancel():
                raise
            raise self.ended from None
        finally:
            self._preparing = None

    def begin(self, run: StreamReader) -> None:
        """Raises what it was ended with while its request was prepared."""
        if self.ended is not None:
            raise self.ended
        self.run = run


class Session(Generic[MessageT]):
    """Of one connection. `prepare`, `show`, `send_end` and `send_message` are its transport's."""

    def __init__(self, backend: GatewayBackend, context: Context) -> None:
        """`context`: what holds for all of its generations."""
        self._backend = backend
        self._context = context
        self._sending = asyncio.Lock()
        self._turns: dict[str, Turn[MessageT]] = {}  # unfinished generations by the client's name
        self._tasks = TaskSet()
        self._ended = False

    # --- of each transport -----------------------------------------------------------------------

    async def prepare(self, message: MessageT) -> StreamReader:
        """The reading that `message` asks for."""
        raise NotImplementedError

    async def show(self, turn: Turn[MessageT], run: StreamReader) -> None:
        """Sends what `run` reads, to its end."""
        raise NotImplementedError

    async def send_end(self, name: str | None, error: Exception | None) -> None:
        """That a generation is done, `GenerationCancelled` or failed; with an error, that a message was refused."""
        raise NotImplementedError

    async def send_message(self, message: bytes) -> None:
        """Returns when the client has room for more. Raises `ClientGone`."""
        raise NotImplementedError

    def traced(self, message: MessageT) -> AbstractContextManager[object]:
        """Around the work for one generation, where it has a trace of its own."""
        return contextlib.nullcontext()

    def count(self, turn: Turn[MessageT], error: Exception | None) -> None:
        """`turn` has ended: well, or with `error`."""

    def write_messages(self, messages: Sequence[bytes]) -> bool:
        """`send_message` of each, at once; False: they cannot be sent now, and none is."""
        return False

    # --- for the transport -----------------------------------------------------------------------

    async def send(self, message: bytes) -> None:
        """One message at a time."""
        async with self._sending:
            await self.send_message(message)

    def write(self, messages: Sequence[bytes]) -> bool:
        """`send` of each, in no coroutine; False: they cannot be sent now, and none is."""
        return not self._sending.locked() and self.write_messages(messages)

    def begin(self, name: str, message: MessageT) -> None:
        """Raises `InvalidParameter`, `QueueFull`."""
        if name in self._turns:
            raise InvalidSessionMessage(
                "id", f"'{name}' is the id of a generation that has not ended; choose another.", reason="duplicate_id"
            )
        if len(self._turns) >= self._backend.settings.max_generations_per_socket:
            raise QueueFull(
                f"This connection has {len(self._turns)} generations in flight and may have no more; "
                "wait for one to end."
            )
        turn = self._turns[name] = Turn(name, message)
        self._tasks.spawn(self._generate(turn))

    def cancel(self, name: str) -> None:
        """Raises `InvalidSessionMessage`."""
        if name not in self._turns:
            raise InvalidSessionMessage("id", f"no generation '{name}' is under way.", reason="unknown_id")
        self._turns[name].end(GenerationCancelled())

    def end(self, reason: BaseException) -> None:
        """The connection is closed: its generations are left to whoever attaches in time."""
        self._ended = True
        for turn in self._turns.values():
            turn.end(reason)

    async def close(self) -> None:
        """As `end`; returns when nothing is done any more."""
        self.end(ClientGone())
        await self._tasks.cancel()

    async def finished(self) -> None:
        """Waits until every generation has ended."""
        await self._tasks.finished()

    # --- inside ----------------------------------------------------------------------------------

    async def _generate(self, turn: Turn[MessageT]) -> None:
        """One generation, from its request to what tells of its end."""
        error: Exception | None = ClientGone()  # unless it ends in another way
        try:
            with self._backend.active(), self.traced(turn.message):
                await self._answer(turn)
            error = None
        except Exception as raised:
            error = raised
        finally:
            self._turns.pop(turn.name, None)
            self.count(turn, error)
        if self._ended or isinstance(error, ClientGone):
            return
        if error is not None and not isinstance(error, GenerationCancelled):
            log_failure(error)
        with contextlib.suppress(ClientGone, DeadlineExceeded):
            await self.send_end(turn.name, error)

    async def _answer(self, turn: Turn[MessageT]) -> None:
        self._backend.check_draining()
        run = await turn.prepared(self.prepare(turn.message))
        try:
            turn.begin(run)
            await run.begin()
            await self.show(turn, run)
        except GenerationCancelled:
            run.cancel()
            raise
        finally:
            run.close()


def check_name(name: str, param: str = "id") -> str:
    """Raises `InvalidParameter`."""
    if not 1 <= len(name) <= 64:
        raise InvalidField(param, "expected 1 to 64 characters.")
    return name
