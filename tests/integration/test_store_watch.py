"""A store that was switched off for lack of space comes back once there is room, without anybody's hand."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from services.cli.supervision.nats_server import StoreWatch
from shared.errors import BrokerUnavailable
from shared.messages import CancelRequest
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from shared.process import die_with_parent
from tests.chaos.broker import Broker, SmallDisk

LARGE = CancelRequest(["x" * (64 << 10)])


@pytest.mark.slow
async def test_the_store_is_started_again_when_there_is_room(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "nats")
    if not disk.mount():
        pytest.skip("a small file system of its own may not be mounted here")
    server = Broker(tmp_path / "nats")
    try:
        await server.up()
        bus = await Bus.connect(server.settings(journal_max_bytes=8 << 20), "test")
        await ensure_streams(bus)
        told: asyncio.Queue[str] = asyncio.Queue()
        watch = asyncio.create_task(StoreWatch(server, disk.directory, told.put_nowait).run())
        disk.fill()
        async with asyncio.timeout(60):
            with contextlib.suppress(BrokerUnavailable):
                while True:
                    await bus.publish_durable(subjects.tokens("x"), LARGE, timeout=2)
            assert "is full" in await told.get()
            disk.free()
            assert "room" in await told.get()
            await server.wait()
            await server.start(die_with_parent())
            while True:
                with contextlib.suppress(BrokerUnavailable):
                    await bus.publish_durable(subjects.tokens("x"), CancelRequest(["y"]), timeout=2)
                    break
        watch.cancel()
        await bus.close()
    finally:
        await server.stop()
        disk.unmount()
