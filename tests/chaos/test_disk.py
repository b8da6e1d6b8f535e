"""The broker has no room left: nothing that was accepted is lost, and new requests are told so."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.broker import full_store
from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.conftest import Loader
from tests.chaos.exercise import Row, row_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.chaos]


async def test_a_full_disk_is_told_to_clients_and_loses_nothing(
    tmp_path: Path, load: Loader, note: Callable[[Row], None]
) -> None:
    """NATS switches JetStream off when a write fails for lack of space, until it is started again."""
    async with House(tmp_path, Plan(store="tmpfs")) as house:
        if not house.disk.mounted:
            pytest.skip("a small file system of its own may not be mounted here")
        async with load(house) as clients:
            await clients.flowing()
            at = time.monotonic()
            house.disk.fill()
            told = await clients.refused("broker_unavailable")
            house.disk.free()
            await house.broker.kill()
            await house.broker.up()
            whole = time.monotonic()
            await clients.settled(whole)
            await clients.finish()
        note(row_of("full disk of the store", clients.records, house.watch.moved, at, told, whole))
        clients.check(may_refuse=True)
        await house.all_ready()


async def test_a_used_up_quota_is_told_to_clients_and_loses_nothing(
    tmp_path: Path, load: Loader, note: Callable[[Row], None]
) -> None:
    async with House(tmp_path, Plan(store="quota")) as house, load(house) as clients:
        await clients.flowing()
        at = time.monotonic()
        async with full_store(house.bus):
            told = await clients.refused("broker_unavailable")
        whole = time.monotonic()
        await clients.settled(whole)
        await clients.finish()
        note(row_of("used up quota of the store", clients.records, house.watch.moved, at, told, whole))
        clients.check(may_refuse=True)
        await house.all_ready()
