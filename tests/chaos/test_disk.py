"""The broker has no room left: nothing that was accepted is lost, and new requests are told so."""

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import nats.errors
import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError

from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.exercise import Row, row_of
from tests.chaos.expected import stub_tasks
from tests.chaos.load import Load

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.chaos]


def load_of(house: House) -> Load:
    chance = random.Random()
    return Load(house.addresses, stub_tasks(chance, 120), short=stub_tasks(chance, 6))


async def test_a_full_disk_is_told_to_clients_and_loses_nothing(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """NATS switches JetStream off when a write fails for lack of space, until it is started again."""
    async with House(tmp_path, Plan(store="tmpfs")) as house:
        if not house.disk.mounted:
            pytest.skip("a small file system of its own may not be mounted here")
        async with load_of(house) as load:
            await load.flowing()
            at = time.monotonic()
            house.disk.fill()
            told = await load.refused("broker_unavailable")
            house.disk.free()
            await house.broker.kill()
            await house.broker.up()
            whole = time.monotonic()
            await load.settled(whole)
            await load.finish()
        note(row_of("full disk of the store", load.records, house.watch.moved, at, told, whole))
        load.check(may_refuse=True)
        await house.all_ready()


async def test_a_used_up_quota_is_told_to_clients_and_loses_nothing(
    tmp_path: Path, note: Callable[[Row], None]
) -> None:
    async with House(tmp_path, Plan(store="quota")) as house, load_of(house) as load:
        await load.flowing()
        at = time.monotonic()
        jetstream = house.bus.jetstream()
        await jetstream.add_stream(StreamConfig(name="BALLAST", subjects=["ballast"]))
        for size in (1 << 20, 1 << 16, 1 << 10, 16):
            with contextlib.suppress(APIError, nats.errors.Error):
                while True:
                    await jetstream.publish("ballast", bytes(size), timeout=5)
        told = await load.refused("broker_unavailable")
        await jetstream.delete_stream("BALLAST")
        whole = time.monotonic()
        await load.settled(whole)
        await load.finish()
        note(row_of("used up quota of the store", load.records, house.watch.moved, at, told, whole))
        load.check(may_refuse=True)
        await house.all_ready()
