"""One client's connection, as NATS's client protocol has it: lines, of which some announce bytes that follow.

client ──CONNECT, SUB, PUB, PING──▶ Connection ──▶ Server
       ◀──INFO, MSG, PONG, -ERR───
"""

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from tests.simulation.broker.configs import Permissions
from tests.simulation.broker.subjects import is_valid

if TYPE_CHECKING:
    from tests.simulation.broker.server import Server

log = logging.getLogger(__name__)
MOST_LINE = 4096
WRITE_DEADLINE = 10.0  # seconds that a client may leave what is sent to it unread once the way to it is full
PING_INTERVAL = 120.0
MOST_PINGS = 2


LEAST_PARTS = {b"PUB": 2, b"HPUB": 3, b"SUB": 2, b"UNSUB": 1}  # what follows a verb


class Malformed(Exception):
    """A line that does not say what it must."""


class Subscription:
    __slots__ = ("connection", "left", "queue", "sid", "subject")

    def __init__(self, connection: "Connection", subject: str, queue: str, sid: bytes) -> None:
        self.connection, self.subject, self.queue, self.sid = connection, subject, queue, sid
        self.left: int | None = None  # how many messages it still takes; None: any number


class Connection(asyncio.Protocol):
    def __init__(self, server: "Server", number: int) -> None:
        self.server, self.number = server, number
        self.name = self.user = ""
        self.started = time.time_ns()
        self.permissions = Permissions()
        self.no_responders = False
        self.subscriptions: dict[bytes, Subscription] = {}
        self._transport: Any = None
        self._rest = b""
        self._known = not server.users  # whether it may speak
        self._connected = False
        self._out: list[bytes] = []
        self._size = 0
        self._allowed: dict[str, bool] = {}
        self._pings = 0
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reason = ""

    # --- its transport -----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.server.connections[self] = None
        transport.write(b"INFO " + json.dumps(self.server.info(self)).encode() + b" \r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        for subscription in list(self.subscriptions.values()):
            self.server.unsubscribe(subscription)
        self.server.connections.pop(self, None)
        self.server.dirty.pop(self, None)
        if self._connected:
            self._connected = False
            self.server.closed(self, self._reason or ("Client Closed" if exc is None else "Read Error"))
            self.server.flush()

    def pause_writing(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(WRITE_DEADLINE, self.close, "Slow Consumer (Write Deadline)")

    def resume_writing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def close(self, reason: str, error: str = "") -> None:
        """`reason`: as nats-server tells it of."""
        self._reason = self._reason or reason
        if error:
            self._transport.write(b"".join(self._out) + f"-ERR '{error}'\r\n".encode())
        self._out = []
        if error:
            self._transport.close()
        else:
            self._transport.abort()

    # --- out -----------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if not self._out:
            self.server.dirty[self] = None
        self._out.append(data)
        self._size += len(data)

    def flush(self) -> None:
        out, self._out, size, self._size = self._out, [], self._size, 0
        if not out or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() + size > self.server.max_pending:
            self.close("Slow Consumer (Pending Bytes)")
            return
        self._transport.write(b"".join(out))

    def deliver(self, to: Subscription, subject: str, reply: str, header: bytes, payload: bytes) -> None:
        if to.left is not None:
            to.left -= 1
            if to.left <= 0:
                self.server.unsubscribe(to)
        sid, whole = to.sid.decode(), len(header) + len(payload)
        where = f"{subject} {sid} {reply}" if reply else f"{subject} {sid}"
        if header:
            line = f"HMSG {where} {len(header)} {whole}\r\n".encode()
            self.send(b"%b%b%b\r\n" % (line, header, payload))
        else:
            self.send(b"%b%b\r\n" % (f"MSG {where} {whole}\r\n".encode(), payload))

    def _error(self, text: str) -> None:
        log.info("%s, user %s", text, self.user)
        self.send(f"-ERR '{text}'\r\n".encode())

    # --- in ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while at < end and not self._transport.is_closing():
            line_end = data.find(b"\r\n", at)
            if (end if line_end < 0 else line_end) - at > MOST_LINE:
                self.close("Maximum Control Line Exceeded", "Maximum Control Line Exceeded")
            if line_end < 0 or self._transport.is_closing():
                break
            try:
                taken = self._line(data, at, line_end)
            except Malformed:
                self.close("Protocol Violation", "Parser Error")
                break
            if not taken:
                break
            at = taken
        self._rest = data[at:] if at < end else b""
        self.server.flush()

    def _line(self, data: bytes, at: int, line_end: int) -> int:
        """Where the next line begins; 0: this one is not all there yet."""
        verb, _, rest = data[at:line_end].partition(b" ")
        parts = rest.split() if verb in LEAST_PARTS else []
        if len(parts) < LEAST_PARTS.get(verb, 0):
            raise Malformed
        if verb in (b"PUB", b"HPUB"):
            return self._message(verb, parts, data, line_end + 2)
        if verb == b"PING":
            self.send(b"PONG\r\n")
        elif verb == b"PONG":
            self._pings = 0
        elif verb == b"SUB":
            self._subscribe(parts)
        elif verb == b"UNSUB":
            self._unsubscribe(parts)
        elif verb == b"CONNECT":
            self._connect(rest)
        else:
            self.close("Protocol Violation", "Unknown Protocol Operation")
        return line_end + 2

    def _message(self, verb: bytes, parts: list[bytes], data: bytes, start: int) -> int:
        whole = _number(parts[-1])
        if whole > self.server.max_payload:
            self.close("Maximum Message Payload Exceeded", "Maximum Payload Violation")
            return start
        end = start + whole
        if len(data) < end + 2:
            return 0
        if not self._known:
            self._refuse()
            return end + 2
        head = start + _number(parts[-2]) if verb == b"HPUB" else start
        fields = len(parts) - (1 if verb == b"PUB" else 2)
        reply = parts[1].decode() if fields > 1 else ""
        subject = parts[0].decode()
        if self._may_publish(subject):
            self.server.publish(self, subject, reply, data[start:head], data[head:end])
        else:
            self._error(f'Permissions Violation for Publish to "{subject}"')
        return end + 2

    def _may_publish(self, subject: str) -> bool:
        if self.permissions.publish is None:
            return True
        allowed = self._allowed.get(subject)
        if allowed is None:
            if len(self._allowed) > MOST_LINE:
                self._allowed.clear()
            allowed = self._allowed[subject] = self.permissions.may_publish(subject)
        return allowed

    def _refuse(self) -> None:
        self.close("Authentication Failure", "Authorization Violation")

    def _connect(self, text: bytes) -> None:
        try:
            options: dict[str, Any] = json.loads(text)
        except ValueError:
            raise Malformed from None
        user = self.server.authenticate(options.get("user") or "", options.get("pass") or "")
        if user is None:
            self._refuse()
            return
        self.user, self.permissions = options.get("user") or "", user
        self.name, self.no_responders = options.get("name") or "", bool(options.get("no_responders"))
        self._known = True
        if not self._connected:
            self._connected = True
            self.server.opened(self)
            self._ping_later()

    def _ping_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PING_INTERVAL, self._ping)

    def _ping(self) -> None:
        if self._pings >= MOST_PINGS:
            self.close("Stale Connection", "Stale Connection")
            return
        self._pings += 1
        self.send(b"PING\r\n")
        self.server.flush()
        self._ping_later()

    def _subscribe(self, parts: list[bytes]) -> None:
        if not self._known:
            self._refuse()
            return
        subject, sid = parts[0].decode(), parts[-1]
        if not is_valid(subject, wildcards=True):
            self._error("Invalid Subject")
            return
        if not self.permissions.may_subscribe(subject):
            self._error(f'Permissions Violation for Subscription to "{subject}"')
            return
        if sid in self.subscriptions:
            return
        queue = parts[1].decode() if len(parts) > 2 else ""
        subscription = self.subscriptions[sid] = Subscription(self, subject, queue, sid)
        self.server.subscribe(subscription)

    def _unsubscribe(self, parts: list[bytes]) -> None:
        subscription = self.subscriptions.get(parts[0])
        if subscription is None:
            return
        if len(parts) > 1:
            subscription.left = _number(parts[1])  # of those that come: nats-py counts what came itself
        else:
            self.server.unsubscribe(subscription)


def _number(text: bytes) -> int:
    if not text.isdigit():
        raise Malformed
    return int(text)
