"""A NATS cluster of three on loopback ports, whose servers can be killed one by one."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings
from shared.nats.bus import Bus

SIZE = 3


class NatsCluster:
    """Use: `start`, then always `stop`."""

    def __init__(self, directory: Path) -> None:
        with _free_ports(SIZE) as ports:
            routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        self.servers: list[LocalNats] = []
        for number, port in enumerate(ports):
            more = (
                f"server_name: n{number}\n"
                f"cluster {{ name: test, listen: 127.0.0.1:{port}, routes: [{routes}], no_advertise: true }}\n"
            )
            server = LocalNats(directory / f"n{number}", more=more)
            server.password = "secret"  # one for all
            self.servers.append(server)

    @property
    def settings(self) -> CommonSettings:
        first = self.servers[0]
        return CommonSettings(
            nats_url=",".join(server.url for server in self.servers),
            nats_user=first.user,
            nats_password=SecretStr(first.password),
            beat_interval=0.1,
        )

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self.servers))

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def kill_leader(self, bus: Bus, stream: str) -> LocalNats:
        """Ends the server that leads `stream` at once; returns it."""
        name = (await self.cluster_of(bus, stream))["leader"]
        server = self.servers[int(name.removeprefix("n"))]
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        return server

    async def cluster_of(self, bus: Bus, stream: str) -> dict[str, Any]:
        """Who keeps `stream`: `leader`, and `replicas` with their names."""
        answer = await bus.client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5)
        info: dict[str, Any] = msgspec.json.decode(answer.data)
        return dict(info["cluster"])


@contextlib.contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Ports that are free at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield [one.getsockname()[1] for one in sockets]
