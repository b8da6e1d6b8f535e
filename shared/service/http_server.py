"""uvicorn inside a service that has a life of its own: our listener, our signals, TCP_NODELAY."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from shared.errors import ConfigurationError
from shared.service.listener import ConnectionAdmission, Listener

# Seconds for which requests are still read from connections without one, once there are no new connections.
SETTLE = 0.1
TICKS = 10  # uvicorn's of a second; at each tenth it writes the date that answers bear


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the service's own life cycle, listens with our own `Listener`, and waits for nothing that is
    not there when it ends."""

    def __init__(self, config: uvicorn.Config, admission: ConnectionAdmission | None) -> None:
        super().__init__(config)
        self._admission = admission
        if admission is not None and admission.connections is not None:
            self.server_state.connections = admission.connections
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
        self, app: Any, sock: socket.socket, *, admission: ConnectionAdmission | None = None, **options: Any
    ) -> None:
        """`options`: uvicorn's. `admission`: what is asked about connections before they are made."""
        self._sock = sock
        host, port = sock.getsockname()[:2]
        # `host:port` that it listens on, an IPv6 host in brackets; also once it is closed.
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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
    return any(kind.__module__.startswith("uvicorn.protocols.websockets") for kind in type(connection).__mro__)
