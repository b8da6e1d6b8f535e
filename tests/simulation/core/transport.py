"""One end of a connection between two processes, as its process sees it and as the network does.

write ──▶ what lies in buffers on the way ──latency──▶ data_received       in order
          more than HIGH beyond the kernels': pause_writing ◀── a reader that is slow, paused or cut off
"""

import asyncio
import contextvars
from collections import deque
from typing import Any, Protocol

from tests.simulation.core.processes import Process

KERNEL = 1 << 18  # bytes that the kernels of both sides keep in a direction, whoever reads them
# Bytes in the writer's own buffer beyond which it is asked to wait, and below which it may go on: asyncio's.
HIGH, LOW = 1 << 16, 1 << 14


class Segment:
    """Bytes under way, or the end of them."""

    __slots__ = ("chunks", "end", "sent", "size", "split")

    def __init__(self, sent: float, *, end: bool = False) -> None:
        self.sent = sent
        self.chunks: list[bytes] = []
        self.size = 0
        self.end = end
        self.split = 0.0  # not 0: it arrives in two parts, and this share of it first

    def parts(self) -> list[bytes]:
        data = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        if not self.split or len(data) < 2:
            return [data]
        at = 1 + int(self.split * (len(data) - 1))
        return [data[:at], data[at:]]

    def keep(self, count: int) -> None:
        """Only the first bytes arrive."""
        self.chunks = [b"".join(self.chunks)[:count]] if count else []
        self.split = 0.0


class Wire(Protocol):
    """What transports need of the network."""

    loop: Any

    def send(self, end: "Transport", data: bytes) -> None: ...
    def finish(self, end: "Transport") -> None: ...
    def reset(self, end: "Transport") -> None: ...
    def room(self, writer: "Transport") -> None: ...
    def forget(self, end: "Transport") -> None: ...


class Transport(asyncio.Transport):
    def __init__(
        self,
        wire: Wire,
        process: Process,
        protocol: Any,
        *,
        number: int,
        context: contextvars.Context,
        here: tuple[str, int],
        there: tuple[str, int],
    ) -> None:
        super().__init__({"peername": there, "sockname": here})
        self._wire, self.process, self._protocol, self.context = wire, process, protocol, context
        self.number = number  # of the connection: the same for both ends
        self.peer: Transport | None = None
        self.lost = False  # nothing is read from it or written to it any more
        self._closing = False
        self._arrived: deque[bytes | None] = deque()  # bytes that its process has not read yet; None: the end
        self._reading = True
        self._handing = False  # the next of what has arrived is to be handed over in a moment
        self._high, self._low = HIGH, LOW
        self._full = False
        # What the network knows of the direction that leads away from here:
        self.under_way: deque[Segment] = deque()  # sent, and not arrived yet
        self.stuck: deque[Segment] = deque()  # sent while nothing passed
        self.stuck_since = 0.0
        self.next_at = 0.0  # no earlier do the next bytes arrive
        self.owed = 0  # bytes that the other side has not read yet

    # --- as its process sees it --------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closing or not data or not self.process.alive:
            return
        self.owed += len(data)
        self._wire.send(self, bytes(data))
        if not self._full and self.owed > KERNEL + self._high:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._closing and self.process.alive:
            self._closing = True
            self._wire.finish(self)
            self.lose(None)

    def abort(self) -> None:
        if not self.lost and self.process.alive:
            self._closing = True
            self.stuck.clear()
            self._wire.reset(self)
            self.lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return max(0, self.owed - KERNEL)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH if high is None and low is None else 4 * (low or 0) if high is None else high
        self._low = self._high // 4 if low is None else low

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._wire.loop.call_soon(self._hand_over, context=self.context)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    # --- as the network sees it ----------------------------------------------------------------------

    def arrive(self, segment: Segment) -> None:
        """In a callback of its process."""
        peer = self.peer
        assert peer is not None, "both are made before anything is sent"
        if peer.under_way:
            peer.under_way.popleft()
        if self.lost:
            if segment.chunks:
                self._wire.reset(self)  # nobody is here
            return
        if segment.chunks:
            self._arrived.extend(segment.parts())
        if segment.end:
            self._arrived.append(None)
        self._hand_over()

    def _hand_over(self) -> None:
        """One at a time: what the first bytes wake up runs before the next are seen, as with two reads of a socket."""
        if not self._arrived or not self._reading or self._handing or self.lost:
            return
        self._hand_over_one(self._arrived.popleft())
        if self._arrived and not self.lost:
            self._handing = True
            self._wire.loop.call_soon(self._next, context=self.context)

    def _next(self) -> None:
        self._handing = False
        self._hand_over()

    def _hand_over_one(self, data: bytes | None) -> None:
        peer = self.peer
        assert peer is not None, "both are made before anything is sent"
        try:
            if data is None:
                if not self._protocol.eof_received():
                    self.close()
                return
            peer.owed -= len(data)
            if peer._full and peer.owed <= KERNEL + peer._low:
                self._wire.room(peer)
            self._protocol.data_received(data)
        except Exception as error:  # as asyncio's transports do
            told = {"message": "Fatal error: protocol.data_received() call failed.", "exception": error}
            self._wire.loop.call_exception_handler(told)
            self.abort()

    def go_on(self) -> None:
        """There is room again."""
        if self._full and not self.lost and self.owed <= KERNEL + self._low:
            self._full = False
            self._protocol.resume_writing()

    def broken(self, error: Exception) -> None:
        """The connection was reset, or the kernel has given it up."""
        self._closing = True
        self.stuck.clear()
        self.lose(error)

    def lose(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = True
        self._arrived.clear()
        self._wire.forget(self)
        self._wire.loop.call_soon(self._protocol.connection_lost, error, context=self.context)

    def __repr__(self) -> str:
        return f"<connection {self.number} of {self.process.name} with {self.get_extra_info('peername')}>"
