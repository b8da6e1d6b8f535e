"""Streams of bytes between processes: as TCP, with the delays, cuts and resets of a network.

write ──latency──▶ data_received        in order; what lies between is lost with either side, or waits for a cut to heal
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.core.loop import SimulatedLoop
from tests.simulation.core.processes import CURRENT, Process

LATENCY = (0.00005, 0.0005)
"""Seconds that bytes take between two processes, from and to."""
BUFFER = 1 << 18
"""Bytes under way in a direction beyond which a writer is asked to wait."""
Factory = Callable[[], asyncio.BaseProtocol]


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, network: "Network", process: Process, protocol: asyncio.BaseProtocol, there: tuple[str, int]
    ) -> None:
        super().__init__({"peername": there, "sockname": (process.host.name, 0)})
        self._network, self.process, self._protocol = network, process, protocol
        self._context = process.context()
        self.peer: Transport | None = None
        self._closing = False
        self._lost = False
        self._arrived: deque[bytes | None] = deque()
        """Bytes that its process has not read yet; None: the end."""
        self._reading = True
        self._under_way = 0
        self._full = False
        self._next = 0.0
        """No earlier do the next bytes to the peer arrive."""

    # --- as its process sees it --------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        self._under_way += len(data)
        self._network.send(self, bytes(data))
        if self._under_way > BUFFER and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.send(self, None)
            self._lose(None)

    def abort(self) -> None:
        self._closing = True
        self._network.reset(self)
        self._lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._under_way

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._hand_over()

    def is_reading(self) -> bool:
        return self._reading

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # --- as the network sees it ----------------------------------------------------------------------

    def arrive(self, data: bytes | None) -> None:
        """In a callback of its process."""
        if self._lost:
            return
        self._arrived.append(data)
        self._hand_over()

    def _hand_over(self) -> None:
        while self._arrived and self._reading and not self._lost:
            data = self._arrived.popleft()
            if data is None:
                self._protocol.eof_received()
                self._closing = True
                self._lose(None)
                return
            if self.peer is not None:
                self._network.read(self.peer, len(data))
            self._protocol.data_received(data)

    def taken(self, count: int) -> None:
        """The other side has read so many bytes."""
        self._under_way -= count
        if self._full and self._under_way <= BUFFER // 4 and not self._lost:
            self._full = False
            self._protocol.resume_writing()

    def broken(self) -> None:
        """The connection was reset."""
        self._closing = True
        self._lose(ConnectionResetError("connection reset by peer"))

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._network.forget(self)
        self._network.loop.call_soon(self._protocol.connection_lost, error, context=self._context)


class Server(asyncio.AbstractServer):
    def __init__(
        self, network: "Network", address: tuple[str, int], process: Process, factory: Factory
    ) -> None:
        self._network, self.address, self.process, self.factory = network, address, process, factory

    def close(self) -> None:
        self._network.servers.pop(self.address, None)

    async def wait_closed(self) -> None: ...

    def is_serving(self) -> bool:
        return self.address in self._network.servers


class Network:
    """Who hears whom is said by names of hosts."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random) -> None:
        self.loop, self._draw = loop, draw
        self.servers: dict[tuple[str, int], Server] = {}
        self._ends: dict[Transport, None] = {}
        self._cut: set[frozenset[str]] = set()
        self._waiting: list[tuple[Transport, bytes | None]] = []
        """Sent while the line was cut."""
        self._ports = 40000

    # --- faults ------------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts until it is healed; no connection notices by itself."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """What was sent meanwhile arrives."""
        self._cut.discard(frozenset((one, other)))
        waiting, self._waiting = self._waiting, []
        for end, data in waiting:
            self.send(end, data)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def died(self, process: Process) -> None:
        """Its kernel resets its connections; nobody listens there any more."""
        for address in [at for at, server in self.servers.items() if server.process is process]:
            del self.servers[address]
        for end in [end for end in self._ends if end.process is process]:
            self.reset(end)
            self.forget(end)

    # --- connections ---------------------------------------------------------------------------------

    def listen(self, factory: Factory, host: Any, port: int | None) -> Server:
        process = CURRENT.get()
        if not port:
            self._ports += 1
            port = self._ports
        address = (process.host.name, port)
        if address in self.servers:
            raise OSError(98, f"address in use: {address}")
        self.servers[address] = server = Server(self, address, process, factory)
        return server

    async def connect(self, factory: Factory, host: str, port: int) -> tuple[Transport, asyncio.BaseProtocol]:
        process = CURRENT.get()
        await asyncio.sleep(self._delay())
        while self.is_cut(process.host.name, host):  # noqa: ASYNC110  # as TCP tries again
            await asyncio.sleep(1.0)  # as TCP tries again
        server = self.servers.get((host, port))
        if server is None:
            raise ConnectionRefusedError(111, f"{host}:{port} refuses connections")
        protocol, theirs = factory(), server.factory()
        here = Transport(self, process, protocol, server.address)
        there = Transport(self, server.process, theirs, (process.host.name, port))
        here.peer, there.peer = there, here
        self._ends[here] = self._ends[there] = None
        self.loop.call_soon(theirs.connection_made, there, context=there._context)
        protocol.connection_made(here)
        return here, protocol

    def send(self, end: Transport, data: bytes | None) -> None:
        peer = end.peer
        if peer is None:
            return
        if self.is_cut(end.process.host.name, peer.process.host.name):
            self._waiting.append((end, data))
            return
        at = max(self.loop.time() + self._delay(), end._next)
        end._next = at
        self.loop.call_at(at, peer.arrive, data, context=peer._context)

    def read(self, writer: Transport, count: int) -> None:
        self.loop.call_soon(writer.taken, count, context=writer._context)

    def reset(self, end: Transport) -> None:
        """The other side hears of it, if it can hear."""
        peer = end.peer
        if peer is not None and not self.is_cut(end.process.host.name, peer.process.host.name):
            self.loop.call_later(self._delay(), peer.broken, context=peer._context)

    def forget(self, end: Transport) -> None:
        self._ends.pop(end, None)

    def _delay(self) -> float:
        return self._draw.uniform(*LATENCY)
