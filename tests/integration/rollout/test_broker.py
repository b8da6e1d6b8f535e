"""NATS is killed under the whole house: alone, and as the leader of a cluster of three."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.supervision.nats_server import LocalNats
from shared.messages import DispatchBatch, DispatchReply, GenerationRequest, GroupRecord, SamplingParams
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import StartPosition, replay
from shared.nats.kv import Bucket
from shared.nats.streams import ensure_streams
from tests.integration.executor.test_executor import expected as stub_tokens
from tests.integration.rollout.cluster_fixture import House, Load
from tests.nats_cluster import NatsCluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    servers = NatsCluster(tmp_path / "nats")
    await servers.start()
    yield servers
    await servers.stop()


@pytest.fixture
async def cluster_bus(cluster: NatsCluster) -> AsyncIterator[Bus]:
    connection = await Bus.connect(cluster.settings, "test")
    await ensure_streams(connection)
    yield connection
    await connection.close()


@pytest.mark.slow
async def test_services_that_start_together_on_a_new_cluster_open_the_same_buckets(cluster: NatsCluster) -> None:
    """Who comes second is told that a bucket exists before it is shown to it."""
    buses = await asyncio.gather(*(Bus.connect(cluster.settings, f"test-{number}") for number in range(4)))
    try:
        await asyncio.gather(*(ensure_streams(bus) for bus in buses))
        for turn in range(2):
            bounded, plain = f"bounded-{turn}", f"plain-{turn}"
            opened = await asyncio.gather(
                *(Bucket.open(bus, bounded, GroupRecord, ttl=60, max_bytes=1 << 20) for bus in buses),
                *(Bucket.open(bus, plain, GroupRecord, ttl=60 + place) for place, bus in enumerate(buses)),
            )
            assert [await bucket.get("nothing") for bucket in opened] == [None] * len(opened)
    finally:
        for bus in buses:
            await bus.close()


@pytest.mark.slow
async def test_a_killed_and_restarted_nats_loses_nothing_and_restarts_no_executor(tmp_path: Path) -> None:
    server = LocalNats(tmp_path / "nats")
    await server.start()
    settings = server.settings(beat_interval=0.1)
    bus = await Bus.connect(settings, "test")
    await ensure_streams(bus)
    try:
        async with House(bus, settings, tmp_path) as house:
            await house.start_two_of_each()
            epochs = {name: house.group(name).epoch for name in ("executor-0", "executor-1")}
            async with Load(house.urls(), patient=True).running() as load:
                os.kill(server.pid, signal.SIGKILL)
                await server.wait()
                await server.start()
                await load.more(32)
            for name, epoch in epochs.items():
                assert house.group(name).epoch == epoch, "the same ring"
            assert not [one for one in house.processes.values() if one.process.returncode is not None]
    finally:
        await bus.close()
        await server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stream", [subjects.JOURNAL_STREAM, pytest.param(subjects.INTAKE_STREAM, marks=pytest.mark.nightly)]
)
async def test_the_leader_of_a_cluster_is_killed_under_load(
    cluster: NatsCluster, cluster_bus: Bus, tmp_path: Path, stream: str
) -> None:
    async with House(cluster_bus, cluster.settings, tmp_path) as house:
        await house.start_two_of_each()
        for kept in (stream, f"KV_{subjects.GROUPS_BUCKET}"):
            assert len((await cluster.cluster_of(cluster_bus, kept))["replicas"]) == 2, "kept three times"
        epochs = {name: house.group(name).epoch for name in ("executor-0", "executor-1")}
        async with Load(house.urls(), patient=True).running() as load:
            dead = await cluster.kill_leader(cluster_bus, stream)
            await load.more(32)
            await dead.start()
            await load.more(32)
        for name, epoch in epochs.items():
            assert house.group(name).epoch == epoch, "the same ring"


@pytest.mark.nightly
async def test_the_journal_has_every_token_whoever_led_it(
    cluster: NatsCluster, cluster_bus: Bus, tmp_path: Path
) -> None:
    """What was published while it had no leader is published again."""
    began = time.time() - 1
    async with House(cluster_bus, cluster.settings, tmp_path) as house:
        await house.start("executor-0", "services.executor", "--engine", "stub", "--group", "g", "--stub-step-ms", "10")
        work = GenerationRequest("a", "r", "stub", "me", [1], 2000, SamplingParams(seed=4))
        reply = await cluster_bus.request(subjects.dispatch("g"), DispatchBatch([work]), DispatchReply, timeout=30)
        assert reply.accepted == ["a"]
        await cluster.kill_leader(cluster_bus, subjects.JOURNAL_STREAM)
        tokens: dict[int, int] = {}
        deadline = time.monotonic() + 100
        while len(tokens) < 2000:
            assert time.monotonic() < deadline, f"{len(tokens)} tokens are recorded"
            tokens |= await recorded(cluster_bus, began)
        assert [tokens[position] for position in range(2000)] == stub_tokens(4, 0, 2000)


async def recorded(bus: Bus, since: float) -> dict[int, int]:
    """Tokens by position, as far as the journal can be read now."""
    tokens: dict[int, int] = {}
    try:
        async for frame in replay(bus, "me", StartPosition(since=since)):
            for entry in frame.entries:
                tokens.update(enumerate(entry.tokens, entry.position))
    except Exception:  # no leader yet
        return tokens
    return tokens
