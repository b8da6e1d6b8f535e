"""What scripts are run against. All are started, restarted and stopped alike."""

import os
import random
import signal
from pathlib import Path
from typing import Protocol, cast

from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings
from shared.nats.permissions import User, rights
from tests.simulation.broker import server as broker
from tests.simulation.broker.configs import Permissions
from tests.simulation.broker.disk import Disk
from tests.simulation.broker.jetstream import STORE, JetStream


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


class Model:
    """The model of the broker, on a socket of this process's own loop."""

    def __init__(self, directory: Path, *, room: int = 0, users: bool = False) -> None:
        config = LocalNats(directory, least_rights=users)
        self._config = config
        self._users = {name: (password, self._permissions(name, users)) for name, password in config.passwords.items()}
        self._room = room or STORE
        self._disk = Disk()
        self._draw = random.Random(0)
        self._port = 0
        self._server: broker.Server | None = None

    @staticmethod
    def _permissions(user: str, users: bool) -> Permissions:
        given = rights(cast(User, user)) if users else None
        return Permissions(given.publish, given.subscribe) if given else Permissions()

    async def start(self) -> None:
        self._server = broker.Server("model", self._draw, users=self._users, jetstream=self._jetstream)
        self._port = await self._server.listen("127.0.0.1", self._port)
        self._config.url = f"nats://127.0.0.1:{self._port}"

    def _jetstream(self, clients: broker.Server) -> JetStream:
        return JetStream(clients, self._draw, store=self._room, disk=self._disk)

    async def stop(self) -> None:
        assert self._server is not None, "start comes first"
        await self._server.stop()

    async def restart(self, *, kill: bool) -> None:
        await self.stop()
        await self.start()

    def settings(self, user: str = "") -> CommonSettings:
        return self._config.settings(user, beat_interval=0.1)
