"""A broker as one more service of a deployment: the model of nats-server, whose disk outlives it on its host."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.broker.disk import Disk
from tests.simulation.broker.jetstream import JetStream
from tests.simulation.broker.server import Server
from tests.simulation.core.processes import CURRENT, Host

PORT = 4222


@dataclass(frozen=True)
class BrokerSettings:
    """What services are given too, as far as a broker needs it."""

    instance: str = ""
    nats_url: str = ""
    sync_interval: float = 120.0
    """Seconds between two writings that a loss of power leaves."""


class Broker:
    """Has the life of `shared.service.lifecycle.Service`: `run` until `end`."""

    on_state: Callable[[str], None] | None = None

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        self.state = "starting"
        self.server: Server | None = None
        self._ended = asyncio.Event()

    async def run(self) -> None:
        host = CURRENT.get().host
        disk = disk_of(host, self.settings.sync_interval)
        draw = random.Random(f"{self.settings.instance} {random.random()}")
        self.server = Server(
            self.settings.instance, draw, jetstream=lambda clients: JetStream(clients, draw, disk=disk)
        )
        await self.server.listen(host.name, PORT)
        self._become("ready")
        await self._ended.wait()
        self._become("draining")
        await self.server.stop()
        self._become("gone")

    def end(self) -> None:
        self._ended.set()

    def _become(self, state: str) -> None:
        self.state = state
        if self.on_state is not None:
            self.on_state(state)


def disk_of(host: Host, sync_interval: float = 120.0) -> Disk:
    """JetStream's directory on that host; less what a loss of power has taken since it was asked for last."""
    kept: dict[str, Any] = host.disk.setdefault("jetstream", {})
    if "disk" not in kept:
        kept.update(disk=Disk(sync_interval=sync_interval), losses=host.power_losses)
    disk: Disk = kept["disk"]
    if kept["losses"] != host.power_losses:
        kept["losses"] = host.power_losses
        disk.lose_power(time.time_ns())
    return disk
