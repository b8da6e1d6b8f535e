"""Three models of nats-server that keep streams together, over real sockets in one process."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from shared.config import CommonSettings
from shared.errors import BrokerUnavailable
from shared.messages import CancelRequest, SessionPin
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.streams import ensure_streams
from tests.simulation.broker import cluster as module
from tests.simulation.broker.cluster import Cluster, Member
from tests.simulation.broker.server import Server

NAMES = ["n0", "n1", "n2"]


class Three:
    """Servers that can be taken away and brought back."""

    def __init__(self) -> None:
        self.apart: set[str] = set()
        self.cluster = Cluster("test", NAMES, random.Random(1), self._reaches)
        self.servers: dict[str, Server] = {}
        self.ports: dict[str, int] = {}

    def _reaches(self, one: Member, other: Member) -> bool:
        return one is other or not {one.name, other.name} & self.apart

    async def start(self, name: str) -> None:
        draw = random.Random(name)
        joined: list[Member] = []

        def join(server: Server) -> Member:
            joined.append(self.cluster.join(server, draw))
            return joined[0]

        server = self.servers[name] = Server(name, draw, cluster="test", jetstream=join)
        await joined[0].open("127.0.0.1", 0)
        self.ports[name] = await server.listen("127.0.0.1", self.ports.get(name, 0))

    async def until(self, held: object) -> None:
        """`held` is a function."""
        async with asyncio.timeout(20):
            while not held():  # type: ignore[operator]  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)

    async def up(self) -> None:
        for name in NAMES:
            await self.start(name)
        members = self.cluster.members.values()
        await self.until(lambda: all(len(member.routes) == 2 for member in members))
        await self.until(lambda: self.cluster.leaders[""] is not None)

    def settings(self, *names: str) -> CommonSettings:
        urls = ",".join(f"nats://127.0.0.1:{self.ports[name]}" for name in names or NAMES)
        return CommonSettings(nats_url=urls)

    def leader(self, stream: str) -> str:
        leader = self.cluster.leaders[stream]
        return "" if leader is None else leader.name


@pytest.fixture
async def three(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Three]:
    for name, value in (("ELECTION", (0.1, 0.3)), ("FIRST_ELECTION", (0.01, 0.05)), ("LOOK", 0.02)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "RECONNECT", 0.05)
    made = Three()
    await made.up()
    yield made
    for server in made.servers.values():
        await server.stop()


async def test_messages_and_streams_are_everybodys(three: Three) -> None:
    buses = [await Bus.connect(three.settings(name), name) for name in NAMES]
    heard: asyncio.Queue[tuple[str, list[str]]] = asyncio.Queue()

    def hearer(name: str) -> object:
        async def hear(message: CancelRequest) -> None:
            heard.put_nowait((name, message.generation_ids))

        return hear

    for bus in buses:
        assert bus.clustered
        await bus.subscribe("plain", CancelRequest, hearer(bus.where))  # type: ignore[arg-type]
        await bus.subscribe("shared", CancelRequest, hearer("one of them"), queue="q")  # type: ignore[arg-type]
        await bus.flush()
    await buses[0].publish("plain", CancelRequest(["x"]))
    assert {(await asyncio.wait_for(heard.get(), 10))[0] for _ in buses} == {bus.where for bus in buses}
    for number in range(6):
        await buses[number % 3].publish("shared", CancelRequest([str(number)]))
    once = [(await asyncio.wait_for(heard.get(), 10))[1][0] for _ in range(6)]
    assert sorted(once) == list("012345")
    await asyncio.gather(*(ensure_streams(bus) for bus in buses))
    numbers = [await bus.publish_durable("intake.batch.m", CancelRequest(["x"])) for bus in buses]
    assert numbers == [1, 2, 3]
    pins = [await Bucket.open(bus, "sessions", SessionPin) for bus in buses]
    created = await asyncio.gather(*(bucket.create("key", SessionPin("g", 1)) for bucket in pins))
    assert sum(revision is not None for revision in created) == 1
    assert heard.empty()
    for bus in buses:
        await bus.close()


async def test_another_leads_when_one_is_lost_and_what_was_acknowledged_stays(three: Three) -> None:
    first = await Bus.connect(three.settings(), "first")
    await ensure_streams(first)
    await first.close()
    gone = three.leader("INTAKE")
    others = [name for name in NAMES if name != gone]
    bus = await Bus.connect(three.settings(others[0]), "test")  # what it asks is not lost with its connection
    pins = await Bucket.open(bus, "sessions", SessionPin)
    watched: asyncio.Queue[str] = asyncio.Queue()

    async def watch() -> None:
        async for update in pins.watch():
            if update is not None:
                watched.put_nowait(update[0])

    watching = asyncio.create_task(watch())
    elected: asyncio.Queue[str] = asyncio.Queue()
    bus.on_election(elected.put_nowait)
    await pins.put("before", SessionPin("g", 1))
    assert await asyncio.wait_for(watched.get(), 20) == "before"
    assert await bus.publish_durable("intake.batch.m", CancelRequest(["one"])) == 1
    await three.servers[gone].stop()
    assert await bus.publish_durable("intake.batch.m", CancelRequest(["two"])) == 2
    assert three.leader("INTAKE") in others
    await three.until(lambda: three.leader("KV_sessions") in others)
    assert (await pins.items())["before"].group == "g"
    await pins.put("after", SessionPin("g", 1))
    async with asyncio.timeout(20):
        while await watched.get() != "after":
            pass
    await three.start(gone)
    back = await Bus.connect(three.settings(gone), "back")
    assert (await back.jetstream().stream_info("INTAKE")).state.messages == 2
    watching.cancel()
    await back.close()
    await bus.close()


async def test_who_reaches_no_majority_stores_nothing(three: Three) -> None:
    bus = await Bus.connect(three.settings("n0"), "test")
    await ensure_streams(bus)
    three.apart = set(NAMES)
    with pytest.raises(BrokerUnavailable):
        await bus.publish_durable("intake.batch.m", CancelRequest(["x"]), timeout=0.2)
    assert not three.cluster.streams["INTAKE"].messages
    three.apart = set()
    await three.until(lambda: all(map(three.cluster.viable, three.cluster.members.values())))
    await bus.publish_durable("intake.batch.m", CancelRequest(["x"]), timeout=5)
    await bus.close()
