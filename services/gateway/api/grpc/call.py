"""One call: its request, its answer, and its end, whoever brings it about."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.api.grpc.framing import MessageReader
from services.gateway.api.grpc.status import trailers
from services.gateway.auth.authenticator import ANONYMOUS, Principal
from services.gateway.core.errors import InvalidParameter
from services.gateway.server.http2.connection import Http2Connection
from services.gateway.server.http2.frames import Stream
from services.gateway.server.http2.hpack import RESPONSE, Headers
from services.gateway.streams.stream_reader import StreamReader

MESSAGE_BYTES = 64  # what a message that waits takes at least, however short it is
# Units of work (`WorkBudget`) of a message, and how many of its bytes, inflated, take one more.
MESSAGE_WORK, BYTES_PER_UNIT = 20, 1024


class Peer(Protocol):
    """The connection that the call came on."""

    connection: Http2Connection
    paused: bool  # whether what was written waits for the client to read

    def flush_soon(self) -> None: ...

    def hold(self, change: int) -> None:
        """So many bytes more are held of request messages that nobody has taken yet. Raises `QueueFull`."""
        ...


@dataclass(slots=True, eq=False)
class GrpcCall:
    """Given to a method. What it has not read and sent when it returns is not wanted."""

    _peer: Peer
    _stream: Stream
    headers: Headers
    request_id: str = ""
    began: float = field(default_factory=time.perf_counter)
    deadline: float | None = None  # Unix seconds until which the client waits
    timer: asyncio.TimerHandle | None = None
    complete: bool = False  # whether the client has sent all it will
    finished: bool = False
    error: BaseException | None = None  # what it ended with, once it is finished
    model: str = ""  # for logs and metrics
    principal: Principal = ANONYMOUS  # whose call it is
    public: bool = False  # whether it needed no key
    trailing: dict[str, str] = field(default_factory=dict)  # more trailing metadata
    _reader: MessageReader = field(default_factory=lambda: MessageReader(0))
    _single: bool = True
    _messages: deque[bytes] = field(default_factory=deque)
    _waiting: int = 0  # bytes of these, `MESSAGE_BYTES` more for each
    _held: int = 0  # what the connection was told of messages that nobody has taken yet
    _receiving: "asyncio.Future[None] | None" = None
    _sending: "asyncio.Future[None] | None" = None
    _on_end: Callable[[BaseException], None] | None = None
    _ended: BaseException | None = None
    _begun: bool = False

    # --- for methods -----------------------------------------------------------------------------

    def metadata(self, name: str) -> str | None:
        """A value of the request's metadata."""
        return self.headers.metadata.get(name)

    @property
    def waiting(self) -> int:
        """Bytes of messages that nobody has taken yet."""
        return self._waiting

    def take(self) -> bytes:
        """The next of the messages that are there: of a call that has one, that one; once."""
        message = self._messages.popleft()
        self._waiting -= len(message) + MESSAGE_BYTES
        self._hold()
        return message

    async def receive(self) -> bytes | None:
        """The next message; None when there are no more. Raises what `end` was given."""
        while not self._messages:
            if self._ended is not None:
                raise self._ended
            if self.complete:
                return None
            self._receiving = asyncio.get_running_loop().create_future()
            try:
                await self._receiving
            finally:
                self._receiving = None
        message = self.take()
        if self._messages:
            await asyncio.sleep(0)  # a read may bring thousands: others have their turns between two
        else:
            self._release()
        return message

    async def send(self, message: bytes) -> None:
        """Returns when the client's window and the socket have taken it. Raises what `end` was given."""
        if self._ended is not None:
            raise self._ended
        peer = self._peer
        headers = b"" if self._begun else RESPONSE
        self._begun = True
        fits = peer.connection.send(self._stream, headers, message)
        peer.flush_soon()
        if not fits or peer.paused:
            await self._until_writable()

    def write(self, message: bytes) -> bool:
        """`send`, where something was sent before and this would not wait; False: it would, and nothing is sent."""
        if self._ended is not None or not self._begun or self._peer.paused or self._stream.pending:
            return False
        self._peer.connection.send(self._stream, b"", message)
        self._peer.flush_soon()
        return True

    async def wait(self, news: "asyncio.Future[None]") -> None:
        """Returns when `news` is done, or earlier. Raises what `end` was given."""
        if self._ended is None:
            self._receiving = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait((news, self._receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._receiving = None
        if self._ended is not None:
            raise self._ended

    def watch(self, on_end: Callable[[BaseException], None]) -> None:
        """`on_end` is called with the reason when the call ends before its method does. Raises what `end` was given."""
        if self._ended is not None:
            raise self._ended
        self._on_end = on_end

    @contextlib.contextmanager
    def reading(self, run: StreamReader) -> Iterator[None]:
        """Around the reading of the run that answers the call. Raises what `end` was given."""
        self.model = run.model
        try:
            self.watch(run.end)
            yield
        finally:
            run.close()

    # --- for the connection ----------------------------------------------------------------------

    def expect(self, reader: MessageReader, *, single: bool) -> None:
        """`reader` is for its messages; `single`: it takes one alone."""
        self._reader = reader
        self._single = single

    def feed(self, data: bytes, ended: bool) -> None:
        """More of the request. Raises as `MessageReader.feed`, and `QueueFull`."""
        self.complete = ended
        if data:
            for message in self._reader.feed(data):
                self._put(message)
            if self._single and self._messages and self._reader.partial:
                raise self._not_single()
            self._hold()
            if len(self._messages) < 2:  # else the reader is slow: let it be told to wait
                self._release()
        if ended and self._single and not self._messages:
            raise self._not_single()
        self._wake(self._receiving)

    def _not_single(self) -> InvalidParameter:
        more = " and a part" if self._reader.partial else ""
        return InvalidParameter(
            f"The call has {len(self._messages)} whole request messages{more}, and takes exactly one.", param=None
        )

    def end(self, reason: BaseException) -> None:
        """The client has gone, or its time is over: whatever the method waits for raises `reason`."""
        if self._ended is not None:
            return
        self._ended = reason
        self._forget()
        if self._on_end is not None:
            self._on_end(reason)
        self._wake(self._receiving)
        self._wake(self._sending)

    def finish(self, error: BaseException | None) -> None:
        """Ends the answer. Twice is safe: the first counts."""
        if self.finished:
            return
        error = error or self._ended
        self.finished, self.error = True, error
        self._forget()
        if self.timer is not None:
            self.timer.cancel()
        end = trailers(error, self.request_id, self.trailing)
        self._peer.connection.end(self._stream, end if self._begun else RESPONSE + end)
        self._peer.flush_soon()

    def refuse(self, error: BaseException) -> None:
        """Ends a call for what it asks; it counts as one that costs the client nothing."""
        self._stream.refused = True
        self.finish(error)

    def writable(self) -> None:
        """The client has made room."""
        self._wake(self._sending)

    # --- inside ----------------------------------------------------------------------------------

    def _put(self, message: bytes) -> None:
        """One after the other, so that what a few bytes inflate to is refused before it is much."""
        self._messages.append(message)
        self._waiting += len(message) + MESSAGE_BYTES
        self._peer.connection.charge(self._stream, MESSAGE_WORK + len(message) // BYTES_PER_UNIT)
        if self._single and len(self._messages) > 1:
            raise self._not_single()
        self._hold()

    def _hold(self) -> None:
        """Tells the connection what is held now."""
        before, self._held = self._held, self._reader.size + self._waiting
        if self._held != before:
            self._peer.hold(self._held - before)

    def _forget(self) -> None:
        """Nothing more of its messages is wanted."""
        if self._held:
            self._reader = MessageReader(0)
            self._messages.clear()
            self._waiting = 0
            self._peer.hold(-self._held)
            self._held = 0

    def _release(self) -> None:
        self._peer.connection.release(self._stream)
        self._peer.flush_soon()

    async def _until_writable(self) -> None:
        while self._stream.pending or self._peer.paused:
            if self._ended is not None:
                raise self._ended
            self._sending = asyncio.get_running_loop().create_future()
            try:
                await self._sending
            finally:
                self._sending = None

    @staticmethod
    def _wake(waiter: "asyncio.Future[None] | None") -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
