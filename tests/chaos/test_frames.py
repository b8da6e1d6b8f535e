"""Frames that are repeated, reordered, lost, or come from a ring that was given up."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.cluster_fixture import House, Plan
from tests.chaos.conftest import Loader
from tests.chaos.exercise import Row, exercise
from tests.chaos.expected import stub_tasks
from tests.chaos.faults import Fault, PartitionExecutor, StopRing
from tests.chaos.load import Load
from tests.chaos.mischief import FrameMischief, Repeater

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SMALL = {"gateways": 1, "schedulers": 1, "monitors": 1, "tp": 1}
REQUESTS = 120


async def test_frames_that_are_repeated_shuffled_and_dropped_change_nothing(
    tmp_path: Path, remark: Callable[[str], None]
) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    mischief = FrameMischief(random.Random(seed))
    plan = Plan(
        **SMALL,
        step_ms=10,
        mischief={"gateway-0": mischief},
        environment={"RYZANSTEIN_STALL_TIMEOUT": "0.5"},  # a last frame that is dropped leaves no gap
    )
    async with House(tmp_path, plan) as house, Repeater(house.bus, chance) as repeater:
        async with Load(house.addresses, stub_tasks(chance, 60), short=stub_tasks(chance, 6)) as load:
            await load.flowing()
            while len(load.records) < REQUESTS:
                await load.settled(time.monotonic())
            await load.finish()
        done = (
            f"Frames, seed {seed}: {mischief.repeated} repeated, {mischief.swapped} reordered and "
            f"{mischief.dropped} dropped on the way, {repeater.published} published again, "
            f"under {len(load.records)} requests."
        )
        remark(done)
        load.check()
        assert min(mischief.repeated, mischief.swapped, mischief.dropped, repeater.published) > 0, done


@pytest.mark.parametrize(
    "fault",
    [StopRing("executor-1"), pytest.param(PartitionExecutor("executor-0"), marks=pytest.mark.chaos)],
    ids=["stopped", "cut-off"],
)
async def test_a_ring_that_comes_back_from_the_dead_changes_nothing(
    fault: Fault, house: House, load: Loader, note: Callable[[Row], None]
) -> None:
    """It is given up, its requests go on elsewhere, and then it is back with what it has to say.

    A ring that was stopped finds first that its requests were withdrawn; one that was cut off has
    computed on, and brings the tokens.
    """
    entries, tokens = house.watch.late, house.watch.late_tokens
    async with load(house) as clients:
        row = await exercise(house, fault, clients)
        await clients.finish()
    note(row)
    clients.check()
    assert row.moved, "no stream had to move: the test shows nothing"
    brings_tokens = isinstance(fault, PartitionExecutor)
    await house.watch.until(
        lambda: house.watch.late_tokens > tokens if brings_tokens else house.watch.late > entries,
        60,
        "the ring speaks after it was given up; else the test shows nothing",
    )
    await house.all_ready()


@pytest.mark.chaos
async def test_a_ring_that_was_replaced_under_its_name_changes_nothing(
    tmp_path: Path, load: Loader, remark: Callable[[str], None]
) -> None:
    """As when a pod is thought dead and started anew: two rings of one group, of which the older wakes up."""
    async with House(tmp_path, Plan(**SMALL)) as house:
        async with load(house) as clients:
            await clients.flowing()
            at = time.monotonic()
            old = house.members["executor-1"]
            ranks = house.ranks("executor-1")
            for pid in (old.pid, *ranks):
                os.kill(pid, signal.SIGSTOP)
            await house.watch.down("group-1", at)
            await house.add_executor("group-1")
            late = house.watch.late
            await clients.flowing()
            woken = time.monotonic()
            for pid in (*ranks, old.pid):
                os.kill(pid, signal.SIGCONT)
            await clients.settled(await clients.settled(woken))
            await clients.finish()
        clients.check()
        late = house.watch.late - late
        remark(f"A ring that was replaced woke up: {late} late entries, {len(clients.records)} requests.")
