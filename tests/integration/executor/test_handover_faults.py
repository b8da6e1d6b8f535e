"""A hand-over whose line breaks, damages bytes, or loses one of its ends: cache is lost at most, and only for a while.

The rings are real; the test stands between them, as a peer that passes the leader's words on and names its own
addresses, through which the ranks' bytes go.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from shared.messages import GroupLoad, GroupRecord
from shared.messages.groups import BlockOffer, HandoverMessage, HandoverReply
from shared.nats import subjects
from tests.integration.executor.rings import MODEL, Rings, Session, make_served_model

DAMAGED = 20_580  # offset of the byte that is flipped, in the bytes of the second connection
# (connection, position of the first byte, bytes) to the bytes that go on; None: the connection is cut.
Change = Callable[[int, int, bytes], bytes | None]


class Between:
    """A group to the one that leaves; the real peer answers. All bytes of the ranks pass `change`."""

    def __init__(self, rings: Rings, name: str, peer: str, change: Change) -> None:
        self._rings = rings
        self.name = name
        self._peer = peer
        self._change = change
        self._servers: list[asyncio.Server] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.passed = asyncio.Event()  # something has gone through
        self.silent = False

    async def answer(self, message: HandoverMessage) -> HandoverReply | None:
        if self.silent:
            return None
        subject = subjects.handover(self._peer)
        reply = await self._rings.bus.request(subject, message, HandoverReply, timeout=10)
        if isinstance(message, BlockOffer):
            addresses = [await self._open(address) for address in reply.addresses]
            reply = msgspec.structs.replace(reply, addresses=addresses)
        return reply

    async def _open(self, target: tuple[str, int]) -> tuple[str, int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._pass_on(reader, writer, target)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        return "127.0.0.1", server.sockets[0].getsockname()[1]

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int]
    ) -> None:
        number, self.connections = self.connections, self.connections + 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:  # the peer has died
            writer.close()
            return
        self._writers += [writer, far_writer]
        back = asyncio.create_task(self._back(far_reader, writer))
        position = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(512):
                changed = self._change(number, position, data)
                if changed is None:
                    break
                position += len(data)
                far_writer.write(changed)
                await far_writer.drain()
                if position > 4096:
                    self.passed.set()
        far_writer.close()
        writer.close()
        await back

    @staticmethod
    async def _back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(512):
                writer.write(data)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def between(rings: Rings, peer: str, change: Change, name: str = "between") -> AsyncIterator[Between]:
    """The only peer that anybody knows of."""
    made = Between(rings, name, peer, change)
    # NATS knows of it before it answers what is asked on the same connection after it.
    subscription = await rings.bus.subscribe(subjects.handover(name), HandoverMessage, made.answer)  # type: ignore[arg-type]
    await rings.hide()
    await rings.announce(GroupRecord(name, MODEL, "ready", 1, [], GroupLoad(free_blocks=1000)))
    try:
        yield made
    finally:
        await subscription.unsubscribe()
        await made.close()


def held_up(number: int, position: int, data: bytes) -> bytes | None:
    """Passes a first part on, and no more."""
    return data if position < 20_000 else b""


async def talk(house: Rings, group: str, names: str) -> list[Session]:
    sessions = [Session(house, name) for name in names]
    for session in sessions:
        await session.turn(group, 60)
    return sessions


@pytest.mark.slow
async def test_a_line_that_breaks_and_damages_costs_nothing(house: Rings, tmp_path: Path) -> None:
    damaged: list[int] = []

    def change(number: int, position: int, data: bytes) -> bytes | None:
        if number == 0 and position > 50_000:
            return None
        if number == 1 and position <= DAMAGED < position + len(data):
            at = DAMAGED - position
            damaged.append(number)
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    model = make_served_model(tmp_path / "model")
    await house.begin("a", model)
    await house.begin("b", model)
    await house.ready("a", "b")
    sessions = await talk(house, "a", "stuvw")
    async with between(house, "b", change) as way:
        log = await house.leave("a")
    assert way.connections == 2, log
    assert damaged
    for session in sessions:
        pin = await house.pin(session.name)
        assert pin.group == "between"
        reusable = session.reusable
        assert reusable >= 60
        assert await session.turn("b") == reusable


@pytest.mark.nightly
async def test_either_side_may_die_midway(house: Rings, tmp_path: Path) -> None:
    model = make_served_model(tmp_path / "model")
    for name in "abc":
        await house.begin(name, model, "--handover-timeout", "5")
    await house.ready(*"abc")
    await talk(house, "a", "stuvw")
    own = await talk(house, "b", "xy")

    async with between(house, "b", held_up, "first") as way:  # the leaving ring dies
        house.processes["a"].process.send_signal(signal.SIGTERM)
        await way.passed.wait()
        house.kill_ring("a")
    for session in own:
        reusable = session.reusable
        assert await session.turn("b") == reusable, "the peer goes on"
    async with between(house, "b", lambda number, position, data: data, "second"):
        await house.until_logged("b", '"how": "lost"')  # and is there for the next one
        others = await talk(house, "c", "z")
        await house.leave("c")
    reusable = others[0].reusable
    assert await others[0].turn("b") == reusable

    async with between(house, "b", held_up, "third") as way:  # its peer dies
        await house.begin("d", model, "--handover-timeout", "2")
        await house.ready("d")
        await house.hide("third")
        sessions = await talk(house, "d", "ghijk")
        house.processes["d"].process.send_signal(signal.SIGTERM)
        await way.passed.wait()
        way.silent = True
        house.kill_ring("b")
        assert await asyncio.wait_for(house.processes["d"].process.wait(), 40) == 0
    for session in sessions:
        assert await house.pin(session.name) is None, "nobody was told that it has moved"
