"""A listening socket that gives its connections to protocols, and knows of them from the moment they are accepted.

asyncio's own servers tell nobody of a connection before its TLS handshake is over, and give it a minute for that.
Imports no uvicorn: the command line binds sockets too.
"""

import asyncio
import errno
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from shared.errors import ConfigurationError, PortInUse

log = structlog.get_logger(__name__)

BACKLOG = 2048  # connections that the system may hold until they are accepted
AT_ONCE = 64  # connections accepted in one turn of the event loop
PAUSE = 1.0  # seconds before the next try where the process may open no more files
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class ConnectionAdmission(NamedTuple):
    """What is asked about a connection before it is one."""

    handshake_seconds: float | None = None  # time for a TLS handshake; None: asyncio's minute
    # Whether one more may be opened; else it is closed as soon as it is accepted.
    admits: Callable[[], bool] = lambda: True
    # A protocol's connection is accepted, and shakes hands.
    begins: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None
    # It never came to be: `connection_made` will not be called.
    failed: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None
    # Where an HTTP server has those that are open; None: in a set of its own.
    connections: set[Any] | None = None


def bind(host: str, port: int, *, option: str = "--port", shared: bool = False) -> socket.socket:
    """A listening socket; port 0: the system chooses. `option` sets it, for the words of an error.

    `shared`: the system divides new connections among all sockets of this user that listen there with `shared`
    (SO_REUSEPORT, see socket(7)). It does not listen yet, for what is not ready would take connections from what is.
    Raises `PortInUse`, `ConfigurationError`.
    """
    return _bound(host, port, option, shared=shared, listens=not shared)


def reserve(host: str, port: int, *, option: str = "--port", shared: bool = False) -> socket.socket:
    """A socket that keeps a port, 0: one that the system chooses, for others to `bind` until it is closed: several
    with `shared`, else one. It gets no connections itself. Raises as `bind`, also where somebody shares the port
    already."""
    if port:
        bind(host, port, option=option).close()
    sock = _bound(host, port, option, shared=shared, listens=False)
    if shared:  # whoever does not share finds it taken, also while nobody listens
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def _bound(host: str, port: int, option: str, *, shared: bool, listens: bool) -> socket.socket:
    if shared and (sys.platform != "linux" or not hasattr(socket, "SO_REUSEPORT")):
        raise ConfigurationError(
            f"Port {port} cannot be shared: this system does not divide connections among listeners (SO_REUSEPORT as "
            "Linux has it); run one gateway, or each on a port of its own behind a load balancer."
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigurationError(
            f"The address {host!r} cannot be resolved ({error.strerror}); set RYZANSTEIN_HOST or --host."
        ) from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it: a token must not wait for the acknowledgement of the last one.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if listens:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            who = "a program that does not share it, or another user's" if shared else "another program"
            raise PortInUse(
                f"Port {port} on {host} is taken by {who}; stop it, or choose another with {option}."
            ) from None
        raise ConfigurationError(f"Cannot listen on {host}:{port}: {error.strerror}.") from None
    sock.setblocking(False)
    return sock


class Listener:
    """Serves a bound socket."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
        admission: ConnectionAdmission | None = None,
    ) -> None:
        self._sock = sock
        self._make = make
        self._tls = tls
        self._admission = admission or ConnectionAdmission()
        self._loop = asyncio.get_running_loop()
        self._serving = False
        self.opening: set[asyncio.Task[None]] = set()  # connections that were accepted and are not made yet

    def start(self) -> None:
        """Accepts from now on. Raises `OSError`."""
        self._sock.listen(BACKLOG)
        self._sock.setblocking(False)
        self._serving = True
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more; what was accepted comes to be. Twice is safe."""
        if self._serving:
            self._accept(BACKLOG)  # the system resets what it holds for a socket that is closed
            self._serving = False
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    async def wait_closed(self) -> None:
        """Ends handshakes that are under way."""
        for task in list(self.opening):
            task.cancel()
        if self.opening:
            await asyncio.wait(set(self.opening))

    def _accept(self, most: int = AT_ONCE) -> None:
        for _ in range(most):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.warning("accept_failed", error=error.strerror, hint="raise `ulimit -n`")
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(PAUSE, self._go_on)
                return
            if not self._admission.admits():
                sock.close()
                continue
            sock.setblocking(False)
            protocol = self._make()
            self._admission.begins(protocol)
            task = self._loop.create_task(self._open(sock, protocol))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    def _go_on(self) -> None:
        if self._serving:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    async def _open(self, sock: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        seconds = self._admission.handshake_seconds if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError as error:  # the client's doing: no TLS, no common version, too slow, gone
            log.debug("handshake_failed", error=str(error))
            self._admission.failed(protocol)
        except asyncio.CancelledError:
            self._admission.failed(protocol)
            raise
