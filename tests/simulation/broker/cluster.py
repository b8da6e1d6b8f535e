"""Several servers that keep streams together: who leads which stream, and what servers tell each other.

    client ── server ──route──▶ the stream's leader ── stored by a majority ──▶ acknowledged
                                    │ lost: nobody answers for ELECTION ──▶ another leader, told to everybody

Raft itself is not modelled. What a majority has is kept here, outside of all processes, as their disks together would;
so what was acknowledged is never lost, and what was on its way to a leader that died is. A leader that reaches no
majority stores nothing and answers nobody.
"""

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.simulation.broker import api
from tests.simulation.broker.configs import NO_LEADER, Refused, StreamConfig
from tests.simulation.broker.consumers import Consumer
from tests.simulation.broker.jetstream import JetStream
from tests.simulation.broker.server import Server
from tests.simulation.broker.streams import Stream
from tests.simulation.broker.subjects import MOST_CACHED

ELECTION = (4.0, 9.0)  # seconds until the others have missed a leader and chosen another one, from and to
FIRST_ELECTION = (0.2, 1.5)  # the same for one that never had a leader
LOOK = 0.5  # seconds between two looks at who is there
LEADERLESS = 0.5  # seconds until somebody else answers that there is no leader
RECONNECT = 1.0
META = ""  # in place of a stream's name: who decides of streams
_ADVISORY = "STREAM.LEADER_ELECTED"
_OF_STREAMS = ("STREAM.CREATE", "STREAM.NAMES", "STREAM.LIST", "INFO")


class Frame(msgspec.Struct, array_like=True):
    """What a server tells another one."""

    kind: str  # hello, message, jetstream, listened
    subject: str
    reply: str = ""
    header: bytes = b""
    payload: bytes = b""
    to: str = ""
    queues: list[str] = []


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Frame)


class Route(asyncio.Protocol):
    """A connection between two servers."""

    def __init__(self, member: "Member", lost: Callable[[], object]) -> None:
        self._member, self._lost = member, lost
        self._transport: Any = None
        self._rest = b""
        self.peer = ""  # whose it is; nothing before it has said so

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.send(Frame("hello", self._member.name))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._member.routes.get(self.peer) is self:
            del self._member.routes[self.peer]
        self._lost()

    def close(self) -> None:
        self._transport.abort()

    def send(self, frame: Frame) -> None:
        data = _encoder.encode(frame)
        self._transport.write(len(data).to_bytes(4, "big") + data)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while len(data) >= at + 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if len(data) < end:
                break
            self._frame(_decoder.decode(data[at + 4 : end]))
            at = end
        self._rest = data[at:]
        self._member.server.flush()

    def _frame(self, frame: Frame) -> None:
        if frame.kind == "hello":
            self.peer = frame.subject
            self._member.routes[self.peer] = self
        else:
            self._member.heard(frame)


class Peer:
    """Another server, as `Server.route` sees it. What its clients have subscribed to is known at once."""

    def __init__(self, member: "Member", name: str) -> None:
        self._member, self._name = member, name

    def _server(self) -> Server | None:
        there = self._member.cluster.members.get(self._name)
        return there.server if there is not None and self._name in self._member.routes else None

    def interested(self, subject: str) -> bool:
        server = self._server()
        return server is not None and server.listens(subject)

    def pass_on(self, subject: str, reply: str, header: bytes, payload: bytes, to: str, served: set[str]) -> bool:
        """To subscriptions there, and to queue groups that are not `served` yet: they are then."""
        server = self._server()
        if server is None or not server.listens(to or subject):
            return False
        queues = sorted(server.queues(to or subject) - served)
        served.update(queues)
        frame = Frame("message", subject, reply, header, payload, to, queues)
        self._member.routes[self._name].send(frame)
        return True


class Member:
    """JetStream as one server of a cluster has it, for one life of its process."""

    def __init__(self, cluster: "Cluster", server: Server, draw: random.Random) -> None:
        self.cluster, self.server, self.name = cluster, server, server.name
        self.local = JetStream(server, draw)
        self.local.cluster = cluster
        self.routes: dict[str, Route] = {}
        self.up = True
        self.context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: Any = None

    @property
    def streams(self) -> dict[str, Stream]:
        """Those that it leads."""
        return self.local.streams

    async def open(self, host: str, port: int) -> None:
        """Listens for the others, and connects to those that come before it."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: Route(self, _nothing), host, port)
        if isinstance(self._listening, asyncio.Server):
            port = int(self._listening.sockets[0].getsockname()[1])
        self.cluster.joined(self, (host, port))
        for name in self.cluster.names[: self.cluster.names.index(self.name)]:
            self._keep(name)

    def _keep(self, name: str) -> None:
        if self.up:
            task = asyncio.get_running_loop().create_task(self._connect(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, name: str) -> None:
        """Until it is connected; anew when that is lost."""
        loop = asyncio.get_running_loop()
        while self.up:
            address = self.cluster.addresses.get(name)
            if address is not None:
                with contextlib.suppress(OSError):
                    await loop.create_connection(lambda: Route(self, lambda: self._keep(name)), *address)
                    return
            await asyncio.sleep(RECONNECT)

    def stop(self) -> None:
        self.up = False
        for task in self._tasks:
            task.cancel()
        for route in list(self.routes.values()):
            route.close()
        if self._listening is not None:
            self._listening.close()
        self.local.stop()
        self.cluster.left(self)

    # --- what clients of this server want ------------------------------------------------------------

    def handle(self, subject: str, reply: str, header: bytes, payload: bytes) -> bool:
        """False: nobody listens to that."""
        where = self.cluster.where(subject)
        if where is None:
            return False
        if subject.startswith("$JS.API.DIRECT."):
            return api.direct(self.local, subject.split(".")[2:], reply, payload)
        leader = self.cluster.leaders.get(where)
        if leader is not None and self.cluster.members.get(leader.name) is not leader:
            leader = None  # it was another life of that server, whose subscriptions have ended with it
        if leader is self:
            return self._lead(subject, reply, header, payload)
        if leader is not None and leader.name in self.routes:
            if subject.startswith("$JS.API.CONSUMER.MSG.NEXT.") and not self.cluster.has_consumer(subject):
                return False
            self.routes[leader.name].send(Frame("jetstream", subject, reply, header, payload))
            return True
        if subject.startswith("$JS.API.") and reply:
            asyncio.get_running_loop().call_later(LEADERLESS, self._leaderless, subject, reply)
            return True
        return False

    def _lead(self, subject: str, reply: str, header: bytes, payload: bytes) -> bool:
        if not self.cluster.viable(self):
            return True  # it proposes it, and never hears that a majority has it
        return self.local.handle(subject, reply, header, payload)

    def _leaderless(self, subject: str, reply: str) -> None:
        self.server.route(reply, "", b"", api.refusal(subject, NO_LEADER))
        self.server.flush()

    def heard(self, frame: Frame) -> None:
        """Another server says it."""
        if frame.kind == "message":
            self.server.deliver(frame.subject, frame.reply, frame.header, frame.payload, frame.to, frame.queues)
        elif frame.kind == "listened":
            self.local.listened(frame.subject)
        else:
            where = self.cluster.where(frame.subject)
            if where is not None and self.cluster.leaders.get(where) is self:
                self._lead(frame.subject, frame.reply, frame.header, frame.payload)

    def listened(self, subject: str) -> None:
        """A client of this server has subscribed to it."""
        for member in self.cluster.members.values():
            if not member.local.delivers_to(subject):
                continue
            if member is self:
                self.local.listened(subject)
            elif member.name in self.routes:
                self.routes[member.name].send(Frame("listened", subject))


def _nothing() -> None: ...


class Cluster:
    """Outlives its servers."""

    def __init__(
        self,
        name: str,
        servers: list[str],
        draw: random.Random,
        reaches: Callable[[Member, Member], bool] | None = None,
    ) -> None:
        """`servers`: their names. `reaches`: whether bytes pass from one to another, and somebody reads them."""
        self.name, self.names, self._draw = name, servers, draw
        self.members: dict[str, Member] = {}
        self.addresses: dict[str, tuple[str, int]] = {}  # of routes
        self.streams: dict[str, Stream] = {}
        self.leaders: dict[str, Member | None] = {META: None}
        self.elections = 0
        self._homes: dict[str, str] = {}  # of streams that one server keeps alone
        self._where: dict[str, str | None] = {}  # by subject: the stream that takes it
        self._due: dict[str, float] = {}  # when those that have no leader get one
        self._reaches = reaches if reaches is not None else lambda one, other: one.up and other.up
        self._timer: asyncio.TimerHandle | None = None

    # --- servers -------------------------------------------------------------------------------------

    def join(self, server: Server, draw: random.Random) -> Member:
        """As `Server`'s jetstream; then `open` it."""
        member = Member(self, server, draw)
        server.peers = [Peer(member, name) for name in self.names if name != server.name]
        return member

    def joined(self, member: Member, address: tuple[str, int]) -> None:
        self.members[member.name], self.addresses[member.name] = member, address
        if self._timer is None:
            self._look_later()

    def left(self, member: Member) -> None:
        if self.members.get(member.name) is member:
            del self.members[member.name]
        if not self.members and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def viable(self, member: Member) -> bool:
        """Whether it reaches a majority, itself among them."""
        if not member.up or self.members.get(member.name) is not member:
            return False
        others = [other for other in self.members.values() if other is not member]
        reached = sum(self._reaches(member, other) and self._reaches(other, member) for other in others)
        return self._reaches(member, member) and reached + 1 > len(self.names) // 2

    # --- leaders -------------------------------------------------------------------------------------

    def _look_later(self) -> None:
        outside = contextvars.Context()  # of no process: it goes on when each of them has ended
        loop = asyncio.get_running_loop()
        self._timer = outside.run(loop.call_later, LOOK, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        viable = [member for member in self.members.values() if self.viable(member)]
        for name, leader in list(self.leaders.items()):
            if leader is not None and leader in viable:
                self._due.pop(name, None)
                continue
            if name not in self._due:
                times = FIRST_ELECTION if leader is None else ELECTION
                self._due[name] = now + self._draw.uniform(*times)
            if now >= self._due[name]:
                self._elect(name, viable)
        self._look_later()

    def _elect(self, name: str, viable: list[Member]) -> None:
        home = self._homes.get(name)
        able = [member for member in viable if home in (None, member.name)]
        if not able:
            return
        self.elections += 1
        del self._due[name]
        self.lead(name, self._draw.choice(able))

    def lead(self, name: str, member: Member) -> None:
        """From now on `member` leads that stream."""
        before, self.leaders[name] = self.leaders.get(name), member
        if name == META:
            return
        stream = self.streams[name]
        if before is not None:
            before.local.release(stream)
        for consumer in [one for one in stream.watchers.values() if isinstance(one, Consumer)]:
            consumer.waiting.clear()
            if before is not None and not consumer.config.durable_name:
                del stream.watchers[consumer.name]  # it was in the memory of the one that led
        asyncio.get_running_loop().call_soon(self._begin, member, stream, context=member.context)

    def _begin(self, member: Member, stream: Stream) -> None:
        name = stream.config.name
        if self.leaders.get(name) is not member:
            return
        member.local.adopt(stream)
        member.local.tell(
            f"{_ADVISORY}.{name}",
            "stream_leader_elected",
            {"stream": name, "leader": member.name, "replicas": self.placement(name)["replicas"]},
        )
        member.server.flush()

    def placement(self, name: str) -> dict[str, Any]:
        """As stream information has it."""
        leader = self.leaders.get(name)
        told = leader.name if leader is not None else ""
        alone = name in self._homes
        replicas = [
            {"name": other, "current": other in self.members, "active": 0}
            for other in self.names
            if other != told and not alone
        ]
        return {"name": self.name, "leader": told, "replicas": replicas}

    # --- streams -------------------------------------------------------------------------------------

    def place(self, stream: Stream) -> None:
        """A new stream: some server leads it. Raises `Refused`."""
        name = stream.config.name
        viable = [member for member in self.members.values() if self.viable(member)]
        member = self._draw.choice(viable)
        if stream.config.num_replicas == 1:
            self._homes[name] = member.name
        self.streams[name] = stream
        self.changed()
        self.lead(name, member)
        member.local.adopt(stream)  # whoever made it may use it at once

    def check(self, config: StreamConfig) -> None:
        """Raises `Refused`."""
        if config.num_replicas > len(self.members):
            raise Refused(400, 10005, "no suitable peers for placement")

    def changed(self) -> None:
        """Streams may take other subjects."""
        self._where.clear()

    def forget(self, name: str) -> None:
        self.changed()
        for known in (self.streams, self.leaders, self._homes, self._due):
            known.pop(name, None)

    def where(self, subject: str) -> str | None:
        """Which stream is asked, META for whoever decides of streams; None: nobody takes it."""
        if not subject.startswith("$JS."):
            if subject not in self._where:
                if len(self._where) >= MOST_CACHED:
                    self._where.clear()
                found = (name for name, stream in self.streams.items() if stream.takes(subject))
                self._where[subject] = next(found, None)
            return self._where[subject]
        tokens = subject.split(".")
        if tokens[1] == "ACK":
            return tokens[2] if tokens[2] in self.streams else None
        if tokens[1] != "API":
            return None
        if ".".join(tokens[2:4]) in _OF_STREAMS or tokens[2] in _OF_STREAMS:
            return META
        name = next((token for token in tokens[4:6] if token in self.streams), None)
        return META if name is None else name

    def has_consumer(self, subject: str) -> bool:
        """Of a pull's subject."""
        stream, _, consumer = subject.removeprefix("$JS.API.CONSUMER.MSG.NEXT.").partition(".")
        return stream in self.streams and consumer in self.streams[stream].watchers
