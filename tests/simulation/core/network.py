"""Streams of bytes between processes: as TCP, with the delays, cuts and resets of a network.

write ──latency──▶ data_received      in order; what lies between may be lost with its writer, or waits for a cut

    process killed   what it wrote arrives in whole or in part, then the end or a reset
    host off         silence: who writes to it gets a reset once it is on again, or gives up after GIVE_UP
    line cut         silence: what was written arrives some time after it is whole again
"""

import asyncio
import contextvars
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.core.links import Link, Links, noticed
from tests.simulation.core.loop import SimulatedLoop
from tests.simulation.core.processes import CURRENT, OUTSIDE, Host, Process
from tests.simulation.core.trace import Trace
from tests.simulation.core.transport import Segment, Transport

SPLIT_SHARE = 1 / 64  # of segments arrive in two parts
# Of connections of a killed process whose peers get all that was written, and then the end.
ORDERLY_SHARE = 0.6
# Seconds that TCP waits for an answer to each of its attempts to connect; then ETIMEDOUT.
CONNECT_TRIES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# Seconds without an acknowledgement after which TCP gives a connection up: Linux's default of 15 retries.
GIVE_UP = 924.6
FIRST_PORT = 40_000
Factory = Callable[[], Any]


class _Listening:
    """What `Server.sockets` holds: enough to ask for its address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address


class Server(asyncio.AbstractServer):
    def __init__(self, network: "Network", address: tuple[str, int], process: Process, factory: Factory) -> None:
        self._network, self.address, self.process, self.factory = network, address, process, factory
        self.context = contextvars.copy_context()

    @property
    def sockets(self) -> tuple[_Listening, ...]:
        return (_Listening(self.address),) if self.is_serving() else ()

    def close(self) -> None:
        if self.is_serving():
            del self._network.servers[self.address]

    async def wait_closed(self) -> None: ...

    async def start_serving(self) -> None: ...

    def is_serving(self) -> bool:
        return self._network.servers.get(self.address) is self


class Network:
    """Who hears whom is said by names of hosts."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random, trace: Trace) -> None:
        self.loop, self._draw, self._trace = loop, draw, trace
        self.servers: dict[tuple[str, int], Server] = {}
        self.hosts: dict[str, Host] = {}  # whose names can be resolved: the world's
        self._links = Links()
        self._ends: dict[Transport, None] = {}
        self._stuck: dict[Transport, None] = {}  # whose bytes wait for a line to become whole
        self._ports = FIRST_PORT
        self._numbers = 0
        self._context = OUTSIDE.context()

    # --- faults ------------------------------------------------------------------------------------

    def cut(self, one: str, other: str, *, both: bool = True) -> None:
        """Nothing passes between two hosts until it is healed; no connection notices by itself.

        Unless `both`, what `other` sends still arrives at `one`.
        """
        self._links.cut([(one, other), (other, one)] if both else [(one, other)], True)

    def heal(self, one: str, other: str) -> None:
        """What was sent meanwhile arrives."""
        self._links.cut([(one, other), (other, one)], False)
        self._healed()

    def isolate(self, host: str) -> None:
        """All lines of a host are cut; its own processes still hear each other."""
        self._links.part(host)

    def rejoin(self, host: str) -> None:
        """The host's lines are whole again, but for those that were cut by themselves."""
        if host not in self.hosts or self.hosts[host].powered:
            self._links.join(host)
        self._healed()

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes in one direction at least."""
        return not (self._links.passes(one, other) and self._links.passes(other, one))

    def link(self, one: str, other: str) -> Link:
        """From one to the other; to be set slow or lossy, and back."""
        return self._links.between(one, other)

    def slow(self, one: str, other: str, seconds: float) -> None:
        """Everything between them takes so many seconds longer, one half more or less; 0: as usual again."""
        self.link(one, other).slow = self.link(other, one).slow = seconds

    def lossy(self, one: str, other: str, share: float) -> None:
        """Of all segments between them this share is lost and sent again, later and later; 0: as usual again."""
        self.link(one, other).loss = self.link(other, one).loss = share

    def connections(self, one: str = "", other: str = "") -> list[Transport]:
        """One end of each, oldest first: all, of a host, or between two hosts."""
        found = {}
        for end in self._ends:
            names = (end.process.host.name, end.peer.process.host.name) if end.peer is not None else ("", "")
            if (not one or one in names) and (not other or (one, other) in (names, names[::-1])):
                found.setdefault(end.number, end)
        return list(found.values())

    def break_connection(self, end: Transport) -> None:
        """Something on the way resets it: both sides hear of it, what is under way is lost."""
        self._trace.add(self.loop.time(), end.process.name, "reset", f"connection {end.number}", _name(end.peer))
        for side in (end, end.peer):
            if side is not None and not side.lost:
                _drop(side, 0)
                self.loop.call_later(self._delay(side), side.broken, _reset(), context=side.context)

    # --- ends of processes and hosts -----------------------------------------------------------------

    def died(self, process: Process) -> None:
        """Its kernel ends its connections; nobody listens there any more."""
        for end in self._left_by(process):
            if self._draw.random() < ORDERLY_SHARE:
                self.finish(end)
            else:
                _drop(end, self._draw.randrange(sum(one.size for one in end.under_way) + 1))
                self.reset(end)

    def vanished(self, process: Process) -> None:
        """Its host has no power: nobody hears anything."""
        for end in self._left_by(process):
            _drop(end, self._draw.randrange(sum(one.size for one in end.under_way) + 1))
            end.stuck.clear()
            if (peer := end.peer) is not None and not peer.lost:
                for segment in peer.under_way:  # it is never acknowledged, so it is sent again
                    self._hold(peer, segment)
                peer.under_way.clear()

    def _left_by(self, process: Process) -> Iterator[Transport]:
        for address in [at for at, server in self.servers.items() if server.process is process]:
            del self.servers[address]
        for end in [end for end in self._ends if end.process is process]:
            end.lost = True
            self.forget(end)
            yield end

    # --- connections ---------------------------------------------------------------------------------

    def listen(self, factory: Factory, host: Any, port: int | None) -> Server:
        process = CURRENT.get()
        address = (process.host.name, port or self._free_port())
        if address in self.servers:
            raise OSError(98, f"address in use: {address}")
        self.servers[address] = server = Server(self, address, process, factory)
        return server

    async def connect(self, factory: Factory, host: str, port: int) -> tuple[Transport, Any]:
        """Raises `OSError` as TCP does: no such name, refused, timed out."""
        process = CURRENT.get()
        own = process.host.name
        host = own if host in ("127.0.0.1", "localhost", "::1") else host
        if host not in self.hosts and not any(host == name for name, _ in self.servers):
            raise socket.gaierror(-2, f"no host has the name {host}")
        await self._shaken_hands(own, host, port)
        server = self.servers.get((host, int(port)))
        if server is None:
            raise ConnectionRefusedError(111, f"{host}:{port} refuses connections")
        return self._connected(process, factory(), server)

    async def _shaken_hands(self, own: str, host: str, port: int) -> None:
        for wait in CONNECT_TRIES:
            if not self.is_cut(own, host):
                there, back = self._links.between(own, host), self._links.between(host, own)
                await asyncio.sleep(there.delay(self._draw) + back.delay(self._draw))
                return
            await asyncio.sleep(wait)
        raise TimeoutError(110, f"no answer from {host}:{port}")

    def _connected(self, process: Process, protocol: Any, server: Server) -> tuple[Transport, Any]:
        self._numbers += 1
        number, ours = self._numbers, (process.host.name, self._free_port())
        context = contextvars.copy_context()
        here = Transport(self, process, protocol, number=number, context=context, here=ours, there=server.address)
        self._trace.add(self.loop.time(), process.name, "connect", f"connection {number}", server.process.name)
        self._ends[here] = None
        self._accept(here, ours, server)
        protocol.connection_made(here)
        return here, protocol

    def _accept(self, here: Transport, ours: tuple[str, int], server: Server) -> None:
        """Its kernel has accepted the connection; the process hears of it when it comes to that."""
        context = server.context.copy()
        theirs = context.run(server.factory)
        there = Transport(
            self, server.process, theirs, number=here.number, context=context, here=server.address, there=ours
        )
        here.peer, there.peer = there, here
        self._ends[there] = None
        self.loop.call_soon(theirs.connection_made, there, context=context)

    def _free_port(self) -> int:
        self._ports += 1
        return self._ports

    # --- bytes -----------------------------------------------------------------------------------------

    def send(self, end: Transport, data: bytes) -> None:
        peer, now = end.peer, self.loop._now
        assert peer is not None, "both are made before anything is sent"
        self._trace.message(now, end.number, end.process.name, peer.process.name, data)
        queue = end.stuck or end.under_way
        if not queue or queue[-1].sent != now or queue[-1].end:
            segment = Segment(now)
            segment.chunks.append(data)
            segment.size = len(data)
            self._pass_on(end, segment)
            return
        last = queue[-1]  # of the same moment: one segment
        last.chunks.append(data)
        last.size += len(data)

    def finish(self, end: Transport) -> None:
        """Behind what was written, the other side reads the end."""
        self._pass_on(end, Segment(self.loop.time(), end=True))

    def _pass_on(self, end: Transport, segment: Segment) -> None:
        peer = end.peer
        assert peer is not None, "both are made before anything is sent"
        if end.stuck or not self._links.passes(end.process.host.name, peer.process.host.name):
            self._hold(end, segment)
            return
        if peer.lost:
            if segment.chunks and not end.lost:
                self.reset(peer)  # nobody is there
            return
        drawn = self._draw.random()
        if drawn < SPLIT_SHARE:
            segment.split = drawn / SPLIT_SHARE
        self._arrives(end, segment, self.loop._now + self._delay(end))

    def _arrives(self, end: Transport, segment: Segment, at: float) -> None:
        peer = end.peer
        assert peer is not None, "both are made before anything is sent"
        end.next_at = at = max(at, end.next_at)
        end.under_way.append(segment)
        self.loop.call_at(at, peer.arrive, segment, context=peer.context)

    def room(self, writer: Transport) -> None:
        self.loop.call_later(self._delay(writer), writer.go_on, context=writer.context)

    def reset(self, end: Transport) -> None:
        """The other side hears of it behind what was written, if it can hear."""
        peer = end.peer
        if peer is None or peer.lost:
            return
        if self._links.passes(end.process.host.name, peer.process.host.name):
            at = max(self.loop.time() + self._delay(end), end.next_at)
            self.loop.call_at(at, peer.broken, _reset(), context=peer.context)

    def forget(self, end: Transport) -> None:
        self._ends.pop(end, None)

    def _delay(self, end: Transport) -> float:
        peer = end.peer
        assert peer is not None, "both are made before anything is sent"
        return self._links.between(end.process.host.name, peer.process.host.name).delay(self._draw)

    # --- lines that were cut -----------------------------------------------------------------------------

    def _hold(self, end: Transport, segment: Segment) -> None:
        if not end.stuck:
            end.stuck_since = self.loop.time()
            self.loop.call_later(GIVE_UP, self._given_up, end, end.stuck_since, context=self._context)
        end.stuck.append(segment)
        self._stuck[end] = None

    def _given_up(self, end: Transport, since: float) -> None:
        if end.stuck and end.stuck_since == since:
            end.stuck.clear()
            self._stuck.pop(end, None)
            if not end.lost:
                error = TimeoutError(110, "nothing was acknowledged")
                self.loop.call_soon(end.broken, error, context=end.context)

    def _healed(self) -> None:
        """What waits for lines that are whole again is sent again, each connection's when its kernel tries next."""
        for end in list(self._stuck):
            if end.peer is not None and self._links.passes(end.process.host.name, end.peer.process.host.name):
                wait = noticed(self._draw, self.loop.time() - end.stuck_since)
                self.loop.call_later(wait, self._sent_again, end, context=self._context)

    def _sent_again(self, end: Transport) -> None:
        peer = end.peer
        if not end.stuck or peer is None:
            self._stuck.pop(end, None)
            return
        if not self._links.passes(end.process.host.name, peer.process.host.name):
            return  # it was cut again
        self._stuck.pop(end, None)
        segments = list(end.stuck)
        end.stuck.clear()
        for segment in segments:
            self._pass_on(end, segment)


def _drop(end: Transport, kept: int) -> None:
    """Of what is under way only the first `kept` bytes arrive, and no end."""
    for segment in end.under_way:
        if kept < segment.size:
            segment.keep(kept)
        kept = max(0, kept - segment.size)
        segment.end = False


def _reset() -> ConnectionResetError:
    return ConnectionResetError(104, "connection reset by peer")


def _name(end: Transport | None) -> str:
    return end.process.name if end is not None else ""
