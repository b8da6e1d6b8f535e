"""What scripts are run against. All are started, restarted and stopped alike."""

import os
import signal
from pathlib import Path
from typing import Protocol

from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings


class Server(Protocol):
    """Listens on a loopback port, the same one after a restart."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def restart(self, *, kill: bool) -> None:
        """In good order, or as SIGKILL; what is on its disk is there again. Returns once it listens."""

    def settings(self, user: str = "") -> CommonSettings:
        """For a connection as `user`; empty: one that may do everything."""


class Limited(LocalNats):
    """nats-server with so much room for its streams."""

    def __init__(self, directory: Path, room: int, users: bool) -> None:
        super().__init__(directory, least_rights=users)
        self._room = room

    def _write_config(self) -> Path:
        config = super()._write_config()
        if self._room:
            text = config.read_text()
            config.write_text(
                text.replace("jetstream { store_dir", f"jetstream {{ max_file_store: {self._room}, store_dir")
            )
        return config


class NatsServer:
    """The real one, in a process of its own."""

    def __init__(self, directory: Path, *, room: int = 0, users: bool = False) -> None:
        self._server = Limited(directory, room, users)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def restart(self, *, kill: bool) -> None:
        if kill:
            os.kill(self._server.pid, signal.SIGKILL)
            await self._server.wait()
        else:
            await self._server.stop()
        await self._server.start()

    def settings(self, user: str = "") -> CommonSettings:
        return self._server.settings(user, beat_interval=0.1)


def model(directory: Path, *, room: int = 0) -> Server:
    """The model of the broker, on a real socket."""
    raise NotImplementedError
