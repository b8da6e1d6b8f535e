"""Replicas of a trainer on several hosts, which add up their gradients after every step.

    first replica ◀── its tensors ── each other one        added in the order of the replicas: one sum in every run
    first replica ─── the sums ────▶ each other one        and all step their optimizers alike

Both ends show that they know the attempt's secret, and every message carries a MAC (`ipc/proofs.py`); what is sent is
not encrypted. A message has the size that its reader expects, which is that of a factor. A replica that waits looks
every moment whether it is to end.
"""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from services.executor.ipc.proofs import MAC_SIZE, MessageMac, challenge, respond
from shared.errors import ConfigurationError, InternalError, Unavailable

LOOK = 0.1  # seconds between two looks at whether it is to end, while it waits for others
GREETING_WITHIN = 5.0  # seconds that a greeting may take once it has begun
CONNECT_WITHIN = 20.0
# Seconds between two probes of a silent connection, and how many are left unanswered until it breaks.
KEEPALIVE, PROBES = 10, 6
FIRST, FURTHER = "first replica", "further replica"
_HELLO = struct.Struct("<II64s")  # replica, step, fingerprint in hexadecimal


class Link:
    """A connection between two replicas that have greeted each other."""

    def __init__(
        self, connection: socket.socket, sends: MessageMac, reads: MessageMac, between: Callable[[], None]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._sends, self._reads, self._between = sends, reads, between

    def close(self) -> None:
        self._connection.close()

    def send(self, payload: bytes | memoryview) -> None:
        """Raises `Unavailable`: the other replica is gone."""
        for part in (memoryview(payload), memoryview(self._sends.next(payload))):
            while part:
                wait_for(self._connection, select.POLLOUT, self._between)
                with _other_is_there():
                    part = part[self._connection.send(part) :]

    def receive(self, size: int) -> bytearray:
        """A message of `size` bytes. Raises `Unavailable`; `InternalError` where it is not the other replica's."""
        message = bytearray(size + MAC_SIZE)
        rest = memoryview(message)
        while rest:
            wait_for(self._connection, select.POLLIN, self._between)
            with _other_is_there():
                read = self._connection.recv_into(rest)
                if not read:
                    raise ConnectionError("it has closed the connection")
            rest = rest[read:]
        whole = memoryview(message)
        if not self._reads.accepts(whole[size:], whole[:size]):
            raise InternalError("A message between replicas was changed on its way.")
        return message[:size]


class FirstReplica:
    """Where the others meet."""

    replica = 0

    def __init__(self, count: int, host: str, secret: str, between: Callable[[], None]) -> None:
        """Listens on `host` from now on. `between`: called while it waits; may raise. Raises `ConfigurationError`."""
        self.count = count
        self._secret, self._between = secret.encode(), between
        self._links: dict[int, Link] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=4 * count)
        except OSError as error:
            raise ConfigurationError(
                f"Replicas of a fine-tuning job cannot meet at {host}: {error}; set RYZANSTEIN_RING_HOST to an address "
                "of this host."
            ) from None
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def meet(self, step: int, fingerprint: str) -> None:
        while len(self._links) < self.count - 1:
            wait_for(self._listener, select.POLLIN, self._between)
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it has gone again
                continue
            _watch(connection)
            link = self._greeted(connection)
            if link is None:
                connection.close()
                continue
            try:
                replica, at, theirs = _HELLO.unpack(link.receive(_HELLO.size))
            except Unavailable:
                link.close()
                continue
            self._links[replica] = link
            if (at, theirs) != (step, fingerprint.encode()) or not 0 < replica < self.count:
                raise InternalError(
                    f"The replica {replica} goes on after step {at}, and the first one after step {step}, or with "
                    "other examples or settings."
                )
        self._listener.close()

    def add(self, tensors: Sequence[Tensor]) -> None:
        links = [link for _, link in sorted(self._links.items())]
        with torch.no_grad():
            for tensor in tensors:
                for link in links:
                    tensor += _tensor(link.receive(tensor.nbytes), tensor)
            for tensor in tensors:
                payload = _bytes(tensor)
                for link in links:
                    link.send(payload)

    def close(self) -> None:
        self._listener.close()
        for link in self._links.values():
            link.close()

    def _greeted(self, connection: socket.socket) -> Link | None:
        """None: whoever it was, it was no replica."""
        by = time.monotonic() + GREETING_WITHIN
        try:
            nonces = challenge(connection, self._secret, FIRST, FURTHER, by)
        except OSError:
            return None
        if nonces is None:
            return None
        mine, theirs = (MessageMac(self._secret, side, nonces) for side in (FIRST, FURTHER))
        return Link(connection, mine, theirs, self._between)


class FurtherReplica:
    """One that goes to the first."""

    def __init__(self, replica: int, count: int, address: str, secret: str, between: Callable[[], None]) -> None:
        """`replica`: from 1; `address`: `host:port` of the first; else as `FirstReplica`."""
        self.replica, self.count, self._address = replica, count, address
        self._secret, self._between = secret.encode(), between
        self._connection: socket.socket | None = None
        self._link: Link | None = None

    def meet(self, step: int, fingerprint: str) -> None:
        connection = self._connection = self._connected()
        while (nonces := self._greeted(connection)) is None:
            connection.close()
            with _other_is_there():
                connection = self._connection = self._connect()
        mine, theirs = (MessageMac(self._secret, side, nonces) for side in (FURTHER, FIRST))
        self._link = Link(connection, mine, theirs, self._between)
        self._link.send(_HELLO.pack(self.replica, step, fingerprint.encode()))

    def add(self, tensors: Sequence[Tensor]) -> None:
        assert self._link is not None, "they have met"
        for tensor in tensors:
            self._link.send(_bytes(tensor))
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(_tensor(self._link.receive(tensor.nbytes), tensor))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _greeted(self, connection: socket.socket) -> bytes | None:
        """The nonces of both; None: it has taken too long, as where one of them was suspended meanwhile. Raises as
        `meet`."""
        wait_for(connection, select.POLLIN, self._between)
        by = time.monotonic() + GREETING_WITHIN
        with _other_is_there():
            try:
                nonces = respond(connection, self._secret, FURTHER, FIRST, by)
            except OSError:
                if time.monotonic() < by:
                    raise
                return None
        if nonces is None:
            raise InternalError(f"At {self._address} is another trainer than the job's first replica.")
        return nonces

    def _connect(self) -> socket.socket:
        """Raises OSError."""
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_WITHIN)
        _watch(connection)
        return connection

    def _connected(self) -> socket.socket:
        try:
            return self._connect()
        except OSError as error:
            raise InternalError(
                f"The replica {self.replica} of the job cannot reach the first one at {self._address}: {error}; set "
                "RYZANSTEIN_RING_HOST of executors that train together to addresses at which they reach each other."
            ) from None


def _watch(connection: socket.socket) -> None:
    """It breaks where the other host answers no more, though nothing is sent; small messages go at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEPALIVE),
        (socket.TCP_KEEPINTVL, KEEPALIVE),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def wait_for(connection: socket.socket, event: int, between: Callable[[], None]) -> None:
    """Until it can be read or written (`select.POLLIN`, `select.POLLOUT`), or has ended. Raises what `between`
    raises."""
    poll = select.poll()
    poll.register(connection, event)
    while not poll.poll(LOOK * 1000):
        between()


@contextlib.contextmanager
def _other_is_there() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"Another replica of the job is gone: {error}.") from None


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).numpy().data.cast("B")


def _tensor(message: bytearray, like: Tensor) -> Tensor:
    """Of the dtype and shape of `like`, on its device."""
    return torch.frombuffer(message, dtype=like.dtype).reshape(like.shape).to(like.device)
