"""A server: who is connected, and who gets what is published. JetStream is in `jetstream`.

published ──▶ JetStream, where the subject is one of its own or a stream's
          └─▶ every subscription, and one of each queue group      nobody at all: "no responders" to who asked
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shared.nats import subjects
from tests.simulation.broker.configs import Permissions, text_of
from tests.simulation.broker.jetstream import JetStream
from tests.simulation.broker.protocol import Connection, Subscription
from tests.simulation.broker.subjects import Sublist

ACCOUNT = "RYZANSTEIN"
VERSION = "2.15.1"
MAX_PAYLOAD = 8 << 20
MAX_PENDING = 64 << 20  # bytes that may wait for a client before it is cut off as a slow consumer


class Peer(Protocol):
    """Another server, as `cluster.Peer`."""

    def interested(self, subject: str) -> bool: ...

    def pass_on(self, subject: str, reply: str, header: bytes, payload: bytes, to: str, served: set[str]) -> bool: ...


class Stored(Protocol):
    """JetStream as a server needs it: its own, or one of a cluster."""

    def handle(self, subject: str, reply: str, header: bytes, payload: bytes) -> bool: ...

    def listened(self, subject: str) -> None: ...

    def stop(self) -> None: ...


Users = Mapping[str, tuple[str, Permissions]]  # password and rights of each


class Server:
    """`listen` on the running loop, then `stop`."""

    def __init__(
        self,
        name: str,
        draw: random.Random,
        *,
        users: Users | None = None,
        max_payload: int = MAX_PAYLOAD,
        max_pending: int = MAX_PENDING,
        cluster: str = "",
        jetstream: Callable[["Server"], Stored | None] | None = None,
    ) -> None:
        """No `users`: anybody may do anything. `jetstream` makes another one than its own, on no disk; or none."""
        self.name, self.users, self.max_payload, self.max_pending = name, users, max_payload, max_pending
        self.cluster = cluster
        self.connect_urls: list[str] = []  # of all servers of its cluster
        self.draw = draw
        self.connections: dict[Connection, None] = {}
        self.dirty: dict[Connection, None] = {}  # with something to be sent
        self.peers: list[Peer] = []  # other servers of its cluster
        self._subscribers: Sublist[Subscription] = Sublist()
        self._number = 0
        self._listening: Any = None
        self._events = 0
        self.jetstream: Stored | None = JetStream(self, draw) if jetstream is None else jetstream(self)

    async def listen(self, host: str, port: int = 0) -> int:
        """Returns the port."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._accept, host, port)
        if isinstance(self._listening, asyncio.Server):
            port = int(self._listening.sockets[0].getsockname()[1])
        else:
            port = int(self._listening.address[1])
        self.connect_urls = self.connect_urls or [f"{host}:{port}"]
        return port

    def _accept(self) -> Connection:
        self._number += 1
        return Connection(self, self._number)

    async def stop(self) -> None:
        """Its clients see their connections end; what is stored stays with its JetStream."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.close("Server Shutdown")
        if self.jetstream is not None:
            self.jetstream.stop()
        await asyncio.sleep(0)

    def info(self, connection: Connection) -> dict[str, Any]:
        """What a client is told when it connects."""
        told: dict[str, Any] = {
            "server_id": self.name,
            "server_name": self.name,
            "version": VERSION,
            "proto": 1,
            "headers": True,
            "max_payload": self.max_payload,
            "jetstream": self.jetstream is not None,
            "client_id": connection.number,
            "client_ip": "127.0.0.1",
        }
        if self.users:
            told["auth_required"] = True
        if self.cluster:
            told |= {"cluster": self.cluster, "connect_urls": self.connect_urls}
        return told

    def authenticate(self, user: str, password: str) -> Permissions | None:
        """None: it is refused."""
        if not self.users:
            return Permissions()
        known, permissions = self.users.get(user, ("", None))
        return permissions if permissions is not None and known == password else None

    # --- who listens -------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> None:
        self._subscribers.insert(subscription.subject, subscription)
        if self.jetstream is not None:
            self.jetstream.listened(subscription.subject)

    def unsubscribe(self, subscription: Subscription) -> None:
        if subscription.connection.subscriptions.pop(subscription.sid, None) is not None:
            self._subscribers.remove(subscription.subject, subscription)

    def listens(self, subject: str) -> bool:
        """Whether any of its own clients does."""
        return bool(self._subscribers.match(subject))

    def queues(self, subject: str) -> set[str]:
        """The queue groups of its own clients that take it."""
        return {subscription.queue for subscription in self._subscribers.match(subject) if subscription.queue}

    def interested(self, subject: str) -> bool:
        """Whether any client does, of its own or of its cluster."""
        return self.listens(subject) or any(peer.interested(subject) for peer in self.peers)

    # --- messages ------------------------------------------------------------------------------------

    def publish(self, origin: Connection, subject: str, reply: str, header: bytes, payload: bytes) -> None:
        """What a client says."""
        heard = self.route(subject, reply, header, payload)
        if self.jetstream is not None and self.jetstream.handle(subject, reply, header, payload):
            return
        if not heard and reply and origin.no_responders:
            told = f"NATS/1.0 503\r\nNats-Subject: {subject}\r\n\r\n".encode()
            for subscription in self._subscribers.match(reply):
                if subscription.connection is origin:
                    origin.deliver(subscription, reply, "", told, b"")

    def route(self, subject: str, reply: str, header: bytes, payload: bytes, to: str = "") -> bool:
        """Sends it to whoever has subscribed, to `to` instead of its subject where that is given."""
        heard = self.deliver(subject, reply, header, payload, to)
        if self.peers:
            served = self.queues(to or subject)
            for peer in self.peers:
                heard = peer.pass_on(subject, reply, header, payload, to, served) or heard
        return heard

    def deliver(
        self, subject: str, reply: str, header: bytes, payload: bytes, to: str = "", queues: Sequence[str] | None = None
    ) -> bool:
        """Sends it to its own clients; of `queues` alone where some are given. False: nobody has subscribed."""
        found = self._subscribers.match(to or subject)
        groups: dict[str, list[Subscription]] | None = None
        for subscription in list(found) if len(found) > 1 else found:
            if subscription.queue:
                if queues is None or subscription.queue in queues:
                    groups = {} if groups is None else groups
                    groups.setdefault(subscription.queue, []).append(subscription)
            else:
                subscription.connection.deliver(subscription, subject, reply, header, payload)
        for members in (groups or {}).values():
            chosen = members[0] if len(members) == 1 else self.draw.choice(members)
            chosen.connection.deliver(chosen, subject, reply, header, payload)
        return bool(found)

    def say(self, subject: str, content: dict[str, Any]) -> None:
        """News of the server's own."""
        if self.interested(subject):
            self.route(subject, "", b"", json.dumps(content, separators=(",", ":")).encode())

    def flush(self) -> None:
        """Sends what has gathered."""
        while self.dirty:
            dirty, self.dirty = self.dirty, {}
            for connection in dirty:
                connection.flush()

    # --- connections ---------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        self.say(subjects.CONNECTION_OPENED, self._event("client_connect", connection))

    def closed(self, connection: Connection, reason: str) -> None:
        event = self._event("client_disconnect", connection) | {"reason": reason}
        event["client"]["stop"] = text_of(time.time_ns())
        self.say(subjects.CONNECTION_CLOSED, event)

    def _event(self, kind: str, connection: Connection) -> dict[str, Any]:
        self._events += 1
        now = text_of(time.time_ns())
        client = {
            "start": text_of(connection.started),
            "host": "127.0.0.1",
            "id": connection.number,
            "acc": ACCOUNT,
            "user": connection.user,
            "name": connection.name,
            "lang": "python3",
            "kind": "Client",
            "client_type": "nats",
        }
        return {
            "type": f"io.nats.server.advisory.v1.{kind}",
            "id": f"{self.name}{self._events}",
            "timestamp": now,
            "server": {"name": self.name, "id": self.name, "ver": VERSION, "jetstream": True, "time": now},
            "client": client,
        }
