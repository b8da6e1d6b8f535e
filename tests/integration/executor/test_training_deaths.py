"""Fine-tuning jobs while services die: the same adapter as undisturbed, and one result."""

import contextlib
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.cli.supervision.nats_server import LocalNats
from shared.messages.training import TrainingJob
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from tests.integration.executor.training_cluster import Cluster

pytestmark = pytest.mark.slow

EXAMPLES = 300
LOST = r"Executor host-\d lost, resumed at step [1-9]\d* on host-\d"


def done(job: TrainingJob) -> bool:
    return job.result is not None


def digest_of(job: TrainingJob) -> str:
    return job.result.digest


def trained_to(step: int) -> Callable[[TrainingJob], bool]:
    """Whether some host trains it, and a state of that step or a later one is stored."""
    return lambda job: job.host == job.runner != "" and job.state is not None and job.state.step >= step


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LocalNats]:
    made = LocalNats(tmp_path / "nats")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def cluster(tmp_path: Path, server: LocalNats) -> AsyncIterator[Cluster]:
    """A health monitor, on a broker that may be ended."""
    settings = server.settings(beat_interval=0.1)
    bus = await Bus.connect(settings, "test")
    await ensure_streams(bus)
    try:
        async with contextlib.AsyncExitStack() as stack:
            made = Cluster(bus, settings, tmp_path, stack)
            await made.begin("monitor", "services.health_monitor", "--gone-after", "2")
            yield made
    finally:
        await bus.close()


async def test_whoever_dies_the_adapter_is_the_same(server: LocalNats, cluster: Cluster) -> None:
    """Executors, the scheduler that decides and NATS are killed at random steps."""
    draw = random.Random(22)
    await cluster.begin("scheduler-0", "services.scheduler")
    await cluster.executor("host-0", step_ms=20)
    await cluster.executor("host-1", step_ms=20)
    await cluster.submit("calm", examples=EXAMPLES)
    calm = await cluster.until("calm", done)

    await cluster.submit("hit", examples=EXAMPLES)
    at = 0
    for number in range(2):
        at += draw.randrange(10, 40)
        job = await cluster.until("hit", trained_to(at))
        await cluster.processes[job.host].end(signal.SIGKILL)
        await cluster.executor(f"host-{number + 2}", step_ms=20)
    await cluster.processes["scheduler-0"].end(signal.SIGKILL)
    await cluster.begin("scheduler-1", "services.scheduler")
    before = await cluster.job("hit")
    await server.stop()
    await server.start()
    hit = await cluster.until("hit", done)
    assert hit.attempt >= before.attempt >= 2
    said = await cluster.said("hit")
    assert sorted(event.step for event in said if event.kind == "step") == [*range(1, EXAMPLES + 1)]
    lost = [event for event in said if event.kind == "executor_lost"]
    assert (hit.losses, calm.losses, len(lost)) == (2, 0, 2)
    assert all(re.fullmatch(LOST, event.message) and event.level == "warn" for event in lost)
    assert f"resumed at step {hit.resumed_from} on" in lost[-1].message
    assert digest_of(hit) == digest_of(calm)
    assert sorted(await cluster.left("hit")) == sorted([hit.state.object_name, hit.metrics_object])
    assert not [name for name in await cluster.objects.writings("hit.") if name.split(".")[1] < "2"]


async def test_an_executor_that_was_thought_dead_writes_nothing_more(cluster: Cluster) -> None:
    await cluster.begin("scheduler", "services.scheduler")
    await cluster.executor("host-0", step_ms=20)
    await cluster.submit("job", examples=400)
    job = await cluster.until("job", lambda job: job.state is not None)
    old = cluster.processes["host-0"]
    os.kill(old.process.pid, signal.SIGSTOP)  # its trainer goes on meanwhile
    await cluster.executor("host-1", step_ms=20)
    moved = await cluster.until("job", lambda job: job.attempt == 2 and job.host == "host-1")
    os.kill(old.process.pid, signal.SIGCONT)
    await old.wait_for(lambda beat: beat.host is not None and not beat.host.trainings)
    assert "training_claimed_elsewhere" in old.log.read_text()
    found = await cluster.until("job", done)
    assert (found.attempt, moved.attempt) == (2, 2)
    assert job.attempt == 1
    assert {name.split("/")[1] for name in await cluster.left("job")} == {"2"}
