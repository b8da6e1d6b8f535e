"""One job on two real executors: whichever is killed, the adapter is that of an undisturbed run, bit for bit."""

import contextlib
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.config import CommonSettings
from shared.messages import ModelSpec
from shared.messages.training import Hyperparameters, TrainingJob
from shared.nats.bus import Bus
from tests.integration.executor.rings import CONTEXT, MODEL, make_served_model
from tests.integration.executor.training_cluster import EAGER_EXECUTOR, Cluster

STEPS = 64  # many more than there are before the last kill: two epochs of batches of two


@pytest.mark.nightly
@pytest.mark.timeout(900)  # eight trainers, which get what a loaded machine leaves
async def test_whoever_is_killed_two_hosts_make_the_adapter_of_an_undisturbed_run(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    fields = job_fields(make_served_model(tmp_path / "model"))
    draw = random.Random(36)
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(bus, nats_settings, tmp_path, stack)
        await cluster.begin("monitor", "services.health_monitor", "--gone-after", "2")
        await cluster.begin("scheduler", "services.scheduler")
        cache = str(tmp_path / "cache")
        chosen = f"--takes-models --device cpu --dtype fp32 --model-cache {cache} --fork-server off"

        async def host(name: str) -> None:
            arguments = (*chosen.split(), "--training-state-interval", "0")
            await cluster.begin(name, EAGER_EXECUTOR, *arguments)

        await host("host-0")
        await cluster.submit("calm", **fields)
        alone = await cluster.until("calm", lambda job: job.waiting_for != "")
        assert "side by side, and 1 can take it" in alone.waiting_for
        await host("host-1")
        calm = await cluster.until("calm", lambda job: job.result is not None or job.status == "failed")
        assert calm.result is not None, calm.error

        await cluster.submit("hit", **fields)
        at = draw.randrange(2, 6)
        job = await cluster.until("hit", trained_to(at))
        assert sorted(job.hosts) == ["host-0", "host-1"]
        cluster.trainer(job.helpers[0]).kill()
        second = await cluster.until("hit", lambda now: now.attempt > job.attempt and trained_to(at + 2)(now))
        await cluster.processes[second.host].end(signal.SIGKILL)
        await host("host-2")
        hit = await cluster.until("hit", lambda job: job.result is not None or job.status == "failed")
        assert hit.result is not None, hit.error
        assert hit.attempt > second.attempt
        assert hit.result.digest == calm.result.digest
        assert [one.digest for one in hit.adapters] == [one.digest for one in calm.adapters]
        rows = [await cluster.objects.get(name) for name in (hit.metrics_object, calm.metrics_object)]
        assert rows[0] == rows[1]
        for name in {"host-0", "host-1", "host-2"} - {second.host}:
            await cluster.processes[name].wait_for(lambda beat: beat.host is not None and not beat.host.trainings)


def trained_to(step: int) -> Callable[[TrainingJob], bool]:
    """Whether some host has it, and has stored a state of that step or a later one."""
    return lambda job: job.host != "" and job.state is not None and job.state.step >= step


def job_fields(model: Path) -> dict[str, Any]:
    chosen = Hyperparameters(
        epochs=2, batch_size=2, learning_rate_multiplier=1.0, beta=0.1, rank=4, alpha=8.0, dropout=0.1, replicas=2
    )
    return {
        "examples": STEPS,
        "model": MODEL,
        "base": ModelSpec(MODEL, str(model)),
        "tokens": 10,
        "hyperparameters": msgspec.structs.replace(chosen, max_tokens=CONTEXT),
        "steps": STEPS,
    }
