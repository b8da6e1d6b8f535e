"""What scripts are run against. All are started, restarted and stopped alike."""

import random
from pathlib import Path
from typing import Any, Protocol, cast

from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings
from shared.nats.permissions import User, rights
from tests.chaos.broker import Broker
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


class NatsServer(Broker):
    """The real one, in a process of its own."""

    def __init__(self, directory: Path, *, room: int = 0, users: bool = False) -> None:
        super().__init__(directory, quota=room, least_rights=users)

    async def restart(self, *, kill: bool) -> None:
        await (self.kill() if kill else self.stop())
        await self.start()

    def settings(self, user: str = "", **more: Any) -> CommonSettings:
        return super().settings(user, beat_interval=0.1, **more)


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
