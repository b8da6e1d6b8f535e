"""A broker as one more service of a deployment: the model of nats-server, whose disk outlives it on its host.

Several are a cluster: what a majority of them has outlives each of them.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.simulation.broker.cluster import Cluster, Member
from tests.simulation.broker.disk import Disk
from tests.simulation.broker.jetstream import JetStream
from tests.simulation.broker.server import Server
from tests.simulation.core.processes import CURRENT, Host

PORT, ROUTES = 4222, 6222


@dataclass(frozen=True)
class BrokerSettings:
    """What services are given too, as far as a broker needs it."""

    instance: str = ""
    nats_url: str = ""  # of all brokers: where it names several they are a cluster
    sync_interval: float = 120.0  # seconds between two writings that a loss of power leaves


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
        draw = random.Random(f"{self.settings.instance} {random.random()}")
        brokers = [urlsplit(url).hostname or "" for url in self.settings.nats_url.split(",")]
        if len(brokers) > 1:
            await self._join(brokers, draw)
        else:
            disk = disk_of(host, self.settings.sync_interval)
            self.server = Server(
                self.settings.instance, draw, jetstream=lambda clients: JetStream(clients, draw, disk=disk)
            )
        assert self.server is not None, "it was just made"
        await self.server.listen(host.name, PORT)
        self._become("ready")
        await self._ended.wait()
        self._become("draining")
        await self.server.stop()
        self._become("gone")

    async def _join(self, brokers: list[str], draw: random.Random) -> None:
        cluster, host = cluster_of(brokers), CURRENT.get().host.name
        members: list[Member] = []

        def join(server: Server) -> Member:
            members.append(cluster.join(server, draw))
            return members[0]

        self.server = Server(host, draw, cluster=cluster.name, jetstream=join)
        self.server.connect_urls = [f"{name}:{PORT}" for name in brokers]
        await members[0].open(host, ROUTES)

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


def cluster_of(brokers: list[str]) -> Cluster:
    """What the servers on these hosts have together, in the world whose process asks."""
    world = asyncio.get_running_loop().world  # type: ignore[attr-defined]  # set by the deployment
    shared: dict[str, Any] = world.host(brokers[0]).disk
    if "cluster" not in shared:
        draw = random.Random(f"{world.seed} cluster")
        shared["cluster"] = Cluster("simulated", brokers, draw, lambda one, other: _reaches(world, one, other))
    cluster: Cluster = shared["cluster"]
    return cluster


def _reaches(world: Any, one: Member, other: Member) -> bool:
    """Whether what one says is heard by the other."""
    ends = [member.context[CURRENT] for member in (one, other)]
    if not all(end.alive and not end.stopped for end in ends):
        return False
    return one is other or not world.network.is_cut(ends[0].host.name, ends[1].host.name)
