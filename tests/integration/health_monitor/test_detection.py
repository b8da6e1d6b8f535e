"""Killed and stopped processes, as a real monitor on a real NATS sees them. Times are printed (`pytest -s`)."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.messages import DispatchBatch, DispatchReply, GenerationRequest, GroupBeat
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.health_monitor.test_service import Seen
from tests.processes import ServiceProcess, service_process

DEAF = ("--gone-after", "600", "--hung-after", "600")  # for a monitor that learns nothing from silence


@pytest.fixture
async def seen(bus: Bus) -> AsyncIterator[Seen]:
    watcher = Seen(bus)
    await watcher.start()
    yield watcher
    await watcher.stop()


@contextlib.asynccontextmanager
async def monitor(
    bus: Bus, settings: CommonSettings, directory: Path, *options: str, instance: str = "monitor"
) -> AsyncIterator[ServiceProcess]:
    settings = settings.model_copy(update={"beat_interval": 1.0})
    async with service_process(
        bus, settings, "services.health_monitor", directory, *options, instance=instance
    ) as process:
        await process.wait_ready()
        yield process


@contextlib.asynccontextmanager
async def executor(bus: Bus, settings: CommonSettings, directory: Path) -> AsyncIterator[ServiceProcess]:
    """A ring of two ranks that is at work, with heartbeats and limits as they are by default."""
    settings = settings.model_copy(update={"beat_interval": 1.0})
    options = ("--engine", "stub", "--group", "g", "--tp", "2", "--stub-step-ms", "5")
    async with service_process(
        bus, settings, "services.executor", directory, *options, instance="executor-1"
    ) as process:
        await process.wait_ready()
        work = GenerationRequest("long", "r", "stub", "me", [1, 2, 3], 8000)
        reply = await bus.request(subjects.dispatch("g"), DispatchBatch([work]), DispatchReply, timeout=30)
        assert reply.accepted == ["long"]
        yield process


def ring(process: ServiceProcess) -> GroupBeat:
    group = process.beats[-1].group
    assert group is not None
    return group


async def lost(seen: Seen, epoch: int, what: str, began: float) -> None:
    await seen.until(lambda: ("g", epoch, "down") in seen.events)
    print(f"{what}: known after {time.monotonic() - began:.2f} s")  # noqa: T201


@pytest.mark.parametrize("victim", ["supervisor", pytest.param("leader", marks=pytest.mark.slow)])
async def test_a_killed_executor_is_known_without_a_word_or_a_silence(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, seen: Seen, victim: str
) -> None:
    """The whole executor dies with its supervisor; of a leader whose supervisor is stopped, nobody tells: the ring may
    come back, and is not gone."""
    async with monitor(bus, nats_settings, tmp_path, *DEAF), executor(bus, nats_settings, tmp_path) as process:
        before = ring(process)
        await seen.until_state("g", "ready", before.epoch)
        began = time.monotonic()
        if victim == "leader":
            process.process.send_signal(signal.SIGSTOP)
            os.kill(before.ranks[0].pid, signal.SIGKILL)
        else:
            process.process.kill()
        await lost(seen, before.epoch, f"{victim} killed", began)
        await seen.until_state("g", "hung" if victim == "leader" else "gone", before.epoch)
        if victim == "leader":
            process.process.send_signal(signal.SIGCONT)
            await process.wait_for(
                lambda beat: (
                    (group := beat.group) is not None and (group.state, group.epoch > before.epoch) == ("ready", True)
                )
            )
            epoch = ring(process).epoch
            await seen.until_state("g", "ready", epoch)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["gateway", pytest.param("scheduler", marks=pytest.mark.slow)])
async def test_any_killed_service_is_known_so(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, seen: Seen, service: str
) -> None:
    async with (
        monitor(bus, nats_settings, tmp_path, *DEAF),
        service_process(
            bus, nats_settings, f"services.{service}", tmp_path, *_port(service), instance="victim"
        ) as process,
    ):
        await process.wait_ready()
        await seen.until(lambda: "victim" in seen.services and seen.services["victim"].state == "ready")
        process.process.kill()
        await seen.until(lambda: seen.services["victim"].state == "gone")


def _port(service: str) -> tuple[str, ...]:
    return ("--port", "0") if service == "gateway" else ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stopped",
    [
        "rank 0",
        "the supervisor",
        *(pytest.param(who, marks=pytest.mark.nightly) for who in ("rank 1", "the ring", "everything")),
    ],
)
async def test_a_stopped_process_is_known_by_what_stands_still(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, seen: Seen, stopped: str
) -> None:
    async with monitor(bus, nats_settings, tmp_path), executor(bus, nats_settings, tmp_path) as process:
        before = ring(process)
        await seen.until_state("g", "ready", before.epoch)
        ranks = [rank.pid for rank in before.ranks]
        pids = {
            "rank 0": ranks[:1],
            "rank 1": ranks[1:],
            "the ring": ranks,
            "the supervisor": [process.process.pid],
            "everything": [process.process.pid, *ranks],
        }[stopped]
        began = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await lost(seen, before.epoch, f"{stopped} stopped", began)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await seen.until(lambda: seen.groups["g"].state == "ready")
        if stopped in ("the supervisor", "everything"):
            assert ring(process).epoch == before.epoch, "a ring that wakes is not shot for having slept"


@pytest.mark.slow
async def test_one_of_two_monitors_is_killed_while_a_ring_fails(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, seen: Seen
) -> None:
    """The other one knows as much: it tells at its time, and the states stay right."""
    async with (
        monitor(bus, nats_settings, tmp_path, instance="monitor-1") as first,
        monitor(bus, nats_settings, tmp_path, instance="monitor-2"),
        executor(bus, nats_settings, tmp_path) as process,
    ):
        before = ring(process)
        await seen.until_state("g", "ready", before.epoch)
        began = time.monotonic()
        process.process.send_signal(signal.SIGSTOP)
        first.process.kill()
        await seen.until(lambda: seen.services["monitor-1"].state == "gone")
        await lost(seen, before.epoch, "the supervisor stopped, a monitor killed", began)
        await seen.until_state("g", "gone", before.epoch)
        process.process.send_signal(signal.SIGCONT)
        await seen.until_state("g", "ready", before.epoch)


@pytest.mark.slow
async def test_a_monitor_that_was_stopped_does_not_bring_back_what_it_believed(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, seen: Seen
) -> None:
    async with (
        monitor(bus, nats_settings, tmp_path, instance="monitor-1") as first,
        monitor(bus, nats_settings, tmp_path, instance="monitor-2"),
        executor(bus, nats_settings, tmp_path) as process,
    ):
        before = ring(process)
        await seen.until_state("g", "ready", before.epoch)
        first.process.send_signal(signal.SIGSTOP)
        process.process.kill()
        await lost(seen, before.epoch, "executor killed, a monitor stopped", time.monotonic())
        await seen.until_state("g", "gone", before.epoch)
        first.process.send_signal(signal.SIGCONT)
        beats = len(first.beats)
        async with asyncio.timeout(30):
            while len(first.beats) < beats + 3:
                await asyncio.sleep(0.05)
                assert seen.groups["g"].state == "gone"
        # What it had written before it was stopped may be told late, and says by its time that it is old.
        lost_at = seen.times[seen.events.index(("g", before.epoch, "down"))]
        ups = [at for at, told in zip(seen.times, seen.events, strict=True) if told == ("g", before.epoch, "up")]
        assert max(ups) < lost_at
