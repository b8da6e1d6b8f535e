"""Session pins of a ring that leaves, with an executor's own rights on the broker."""

import asyncio
from pathlib import Path

import pytest

from services.cli.supervision.nats_server import LocalNats
from services.executor.kv_transfer.sender import PinMover
from shared.messages import SessionPin
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.subjects import pin_key


async def test_pins_to_the_leaving_ring_are_moved_and_no_others(tmp_path: Path) -> None:
    server = LocalNats(tmp_path / "nats", least_rights=True)
    await server.start()
    scheduler = await Bus.connect(server.settings("scheduler"), "scheduler")
    executor = await Bus.connect(server.settings("executor"), "executor")
    try:
        pins = await Bucket.open(scheduler, subjects.SESSIONS_BUCKET, SessionPin, ttl=60)  # as at its start
        mover = PinMover(executor, "m", "leaving", ttl=60)
        assert await mover.groups(["mine"]) == [""]
        await pins.put(pin_key("m", "mine"), SessionPin("leaving", 3))
        await pins.put(pin_key("m", "moved"), SessionPin("other", 5))
        sessions = ["mine", "moved", "unknown"]
        assert await mover.groups(sessions) == ["leaving", "other", ""]
        await mover.move(sessions, "peer", 9)
        assert await mover.groups(sessions) == ["peer", "other", "peer"]
        entry = await pins.get(pin_key("m", "mine"))
        assert entry.value == SessionPin("peer", 9)
        assert "permissions violation" not in server.log.read_text().lower()
    finally:
        await scheduler.close()
        await executor.close()
        await server.stop()


@pytest.mark.slow
async def test_a_broker_that_is_gone_is_waited_for_once(tmp_path: Path) -> None:
    server = LocalNats(tmp_path / "nats")
    await server.start()
    executor = await Bus.connect(server.settings(), "executor")
    mover = PinMover(executor, "m", "leaving", ttl=60)
    await server.stop()
    async with asyncio.timeout(20):  # 64 at a time, five seconds each, would be more
        assert await mover.groups([f"s{number}" for number in range(400)]) == [""] * 400
        await mover.move(["s1"], "peer", 9)
    await executor.close()
