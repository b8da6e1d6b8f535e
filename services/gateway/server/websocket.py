"""uvicorn's WebSocket protocol, where a client could make it hold more than it sent, or cry out.

- Fragments are put together as they come: a list of them, empty ones too, would cost many times their bytes.
- Frames may be as small as 6 bytes, and take some 10 us each: of a read of many a few are handled in each turn of the
  event loop, and none while messages wait for the application; those that carry no message are counted (`WorkBudget`).
- Pings are answered as long as the client reads (RFC 6455, 5.5.3 lets all but the last go unanswered).
- What the application still sends to a connection that was closed for a fault finds the client gone, no error.
- Text that is no UTF-8 closes the connection with 1007, without a stack trace of ours.

Its scope has the extension `ryzanstein.websocket`: what streams bring is written without a task (`core/asgi.py`).
"""

from collections.abc import Sequence
from typing import Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame
from websockets.http11 import Request

from services.gateway.core.asgi import WEBSOCKET
from services.gateway.server.work import WorkBudget
from shared.limits import WEBSOCKET_FRAMES

INVALID_DATA, POLICY = 1007, 1008
PART = 1024  # bytes that are parsed before it is looked how many frames they were
FRAMES_AT_ONCE = 64  # frames after which others get their turn


class GuardedWebSocket(WebSocketsSansIOProtocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._message = bytearray()
        self._rest = b""  # what was read and waits for its turn
        self._has_turn = False  # whether it will be parsed in the next turn of the event loop
        self._frames = 0  # frames that came
        self._work = WorkBudget(WEBSOCKET_FRAMES.value)
        self._forgiven = self.loop.time()

    def data_received(self, data: bytes) -> None:
        if self._rest:  # reading was paused, and the transport had this already
            self._rest += data
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """As many frames as one turn of the event loop is for."""
        seconds = int(self.loop.time() - self._forgiven)
        self._forgiven += seconds
        self._work.refund(seconds * self._work.per_second)
        at, enough = 0, self._frames + FRAMES_AT_ONCE
        while at < len(data) and self._frames < enough and not self.transport.is_closing():
            super().data_received(data[at : at + PART])
            at += PART
        self._rest = b"" if self.transport.is_closing() else data[at:]
        self._regulate()

    def _go_on(self) -> None:
        self._has_turn = False
        if self._rest:
            self._parse(self._rest)

    def _regulate(self) -> None:
        """Reads nothing while something that was read waits for its turn, or for the application."""
        waiting = not self.queue.empty() and not self.close_sent  # then nobody takes anything any more
        if self._rest and not waiting and not self._has_turn:
            self._has_turn = True
            self.loop.call_soon(self._go_on)
        paused = bool(self._rest) or waiting
        if paused != self.read_paused and not self.transport.is_closing():
            self.read_paused = paused
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    async def receive(self) -> Any:
        message = await self.queue.get()
        self._regulate()
        return message

    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        self._work.charge(len(self.conn.events))
        super().handle_events()
        if self._work.spent <= self._work.limit or self.close_sent:
            return
        if self.handshake_complete:
            self._fail(POLICY, f"frames without messages ({WEBSOCKET_FRAMES.cited()})")
        else:
            self.transport.abort()

    @property
    def owed(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()

    @property
    def arriving(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._message) + len(self._rest) + len(self.conn.reader.buffer)

    def abort(self) -> None:
        """Waits no longer for the client to read."""
        self.transport.abort()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # else it was refused
            cast("dict[str, object]", self.scope["extensions"])[WEBSOCKET] = self.write_texts

    def write_texts(self, messages: Sequence[bytes]) -> bool:
        """The extension: `send` of each, where that would not wait."""
        if not self.writable.is_set() or self.disconnected or self.close_sent or not self.handshake_complete:
            return False
        try:
            for message in messages:
                self.conn.send_text(message)
        except InvalidState:  # the client is closing
            return False
        self.transport.write(b"".join(self.conn.data_to_send()))
        return True

    def handle_text(self, event: Frame) -> None:
        self.curr_msg_data_type = "text"
        self._begin(event)

    def handle_bytes(self, event: Frame) -> None:
        self.curr_msg_data_type = "bytes"
        self._begin(event)

    def _begin(self, event: Frame) -> None:
        self._message.clear()
        self.handle_cont(event)

    def handle_cont(self, event: Frame) -> None:
        self._message += event.data
        if event.fin:
            self._work.refund(1)
            self.frames = [bytes(self._message)]
            self._message.clear()
            self._take()

    def _take(self) -> None:
        if self.close_sent:
            return
        if self.curr_msg_data_type == "text" and not _is_utf8(self.frames[0]):
            self._fail(INVALID_DATA, "not UTF-8")
        else:
            self.send_receive_event_to_app()

    def _fail(self, code: int, reason: str) -> None:
        self.frames = []
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self.close_sent and self.handshake_complete:
            raise ClientDisconnected  # closed by the protocol itself, which the application cannot know yet
        await super().send(message)
        if self.close_sent:
            self._regulate()  # the client's own close may be in what waits

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # the pong, for nobody who would read it


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
