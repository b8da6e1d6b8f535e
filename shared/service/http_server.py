"""uvicorn inside a service that has a life of its own: our listener, our signals, TCP_NODELAY.

`Listener` knows of connections from the moment they are accepted: asyncio's own servers tell nobody of one before its
TLS handshake is over, and give it a minute for that.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import structlog
import uvicorn

from shared.errors import ConfigurationError, PortInUse

log = structlog.get_logger(__name__)

AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""
PAUSE = 1.0
"""Seconds before the next try where the process may open no more files."""
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Admission(NamedTuple):
    """What is asked about a connection before it is one."""

    handshake_seconds: float | None = None
    """Time for a TLS handshake; None: asyncio's minute."""
    admits: Callable[[], bool] = lambda: True
    """Whether one more may be opened; else it is closed as soon as it is accepted."""
    begins: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None
    """A protocol's connection is accepted, and shakes hands."""
    failed: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None
    """It never came to be: `connection_made` will not be called."""


def bind(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A listening socket; port 0: the system chooses. `option` sets it, for the words of an error.

    Raises `PortInUse`, `ConfigurationError`.
    """
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
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is taken by another program; stop it, or choose another with {option}."
            ) from None
        raise ConfigurationError(f"Cannot listen on {host}:{port}: {error.strerror}.") from None
    sock.setblocking(False)
    return sock


class Listener:
    """Serves a bound and listening socket; what uvicorn asks of an `asyncio.Server` it has too."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._sock = sock
        self._make = make
        self._tls = tls
        self._admission = admission or Admission()
        self._loop = asyncio.get_running_loop()
        self._serving = False
        self.opening: set[asyncio.Task[None]] = set()
        """Connections that were accepted and are not made yet."""

    def start(self) -> None:
        """Accepts from now on. Raises `OSError`."""
        self._sock.listen(2048)
        self._sock.setblocking(False)
        self._serving = True
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def is_serving(self) -> bool:
        return self._serving

    def close(self) -> None:
        """Accepts no more; what was accepted comes to be. Twice is safe."""
        if self._serving:
            self._serving = False
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    async def wait_closed(self) -> None:
        """Ends handshakes that are under way."""
        for task in list(self.opening):
            task.cancel()
        if self.opening:
            await asyncio.wait(set(self.opening))

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.warning("cannot_accept", error=error.strerror, hint="raise `ulimit -n`")
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


SETTLE = 0.1
"""Seconds for which requests are still read from connections without one, once there are no new connections."""
TICKS = 10
"""uvicorn's of a second; at each tenth it writes the date that answers bear."""


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the service's own life cycle, listens with our own `Listener`, and waits for nothing that is
    not there when it ends."""

    def __init__(self, config: uvicorn.Config, admission: Admission | None) -> None:
        super().__init__(config)
        self._admission = admission
        self._told = asyncio.Event()
        self.listeners: list[Listener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, less what it makes of addresses, and with handshakes that somebody counts."""
        config = self.config

        def make() -> asyncio.BaseProtocol:
            kind: Any = config.http_protocol_class
            made: asyncio.BaseProtocol = kind(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self.servers = []
        for sock in sockets or []:
            listener = Listener(sock, make, config.ssl, self._admission)
            listener.start()
            self.listeners.append(listener)
        self.started = True

    def stop_listening(self) -> None:
        """Refuses new connections, and loses none that was accepted before. Twice is safe."""
        for listener in self.listeners:
            listener.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def tell_to_exit(self) -> None:
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """uvicorn looks ten times a second whether it is to exit; this one is told."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks = (ticks + TICKS) % (86400 * TICKS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn gives connections a tenth of a second before it looks whether they have ended."""
        self.stop_listening()
        if await self.may_have_connections() or self.server_state.tasks:
            await super().shutdown(sockets)
        for listener in self.listeners:
            await listener.wait_closed()

    async def may_have_connections(self) -> bool:
        """Once nothing is accepted any more."""
        for _ in range(3):
            await asyncio.sleep(0)  # what was accepted comes to be
        return bool(self.server_state.connections) or any(one.opening for one in self.listeners)


class HttpServer:
    """Serves an ASGI application on a bound socket until `stop`."""

    def __init__(
        self, app: Any, sock: socket.socket, *, admission: Admission | None = None, **options: Any
    ) -> None:
        """`options`: uvicorn's. `admission`: what is asked about connections before they are made."""
        self._sock = sock
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """`host:port` that it listens on, an IPv6 host in brackets; also once it is closed."""
        self._server = _Uvicorn(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", **options), admission
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigurationError(f"The HTTP server on {self.address} ended at its start.")
            await asyncio.sleep(0.005)

    async def stop_accepting(self) -> None:
        """Refuses new connections and closes idle ones; answers and WebSockets under way go on.

        A client finds another server then, instead of an error here. What was sent before it could know is read:
        it takes `SETTLE` seconds where there are connections. Twice is safe.
        """
        if not self._server.started:
            return
        self._server.stop_listening()
        if await self._server.may_have_connections():
            await asyncio.sleep(SETTLE)
        for connection in list(self._server.server_state.connections):
            # uvicorn's `shutdown` of a connection: HTTP ends after the answer, a WebSocket at once.
            if not _is_websocket(connection):
                connection.shutdown()

    async def stop(self, *, grace: float = 5.0) -> None:
        """Stops accepting, waits up to `grace` seconds for open responses, then closes; twice is safe."""
        if self._task is None:
            self._sock.close()
            return
        self._server.tell_to_exit()
        try:
            await asyncio.wait_for(asyncio.shield(self._task), grace)
        except TimeoutError:
            self._server.force_exit = True
            await self._task
        self._task = None


def _is_websocket(connection: object) -> bool:
    """By its name: most services have no WebSockets, and no package for them."""
    return any(
        kind.__module__.startswith("uvicorn.protocols.websockets") for kind in type(connection).__mro__
    )
