"""uvicorn's WebSocket protocol, where a client could make it hold more than it sent, or cry out.

- Fragments are put together as they come: a list of them, empty ones too, would cost many times their bytes.
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
from shared.limits import WEBSOCKET_MESSAGES

INVALID_DATA, POLICY = 1007, 1008


class GuardedWebSocket(WebSocketsSansIOProtocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._message = bytearray()

    @property
    def owed(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()

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
            self.frames = [bytes(self._message)]
            self._message.clear()
            self._take()

    def _take(self) -> None:
        if self.close_sent:
            return
        if self.queue.qsize() >= WEBSOCKET_MESSAGES.value:
            self._fail(POLICY, "too many messages at once")
        elif self.curr_msg_data_type == "text" and not _is_utf8(self.frames[0]):
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
