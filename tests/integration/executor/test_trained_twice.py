"""The real trainer on real executors: killed with its executor again and again, it makes the adapter of an undisturbed
run, bit for bit."""

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
from shared.nats.adapters import CONFIG, WEIGHTS, AdapterFiles
from shared.nats.bus import Bus
from tests.integration.executor.rings import CONTEXT, MODEL, make_served_model
from tests.integration.executor.training_cluster import EAGER_EXECUTOR, Cluster

EXAMPLES, EPOCHS, BATCH = 16, 2, 2
KILLS = 2


@pytest.mark.nightly
@pytest.mark.timeout(900)  # three trainers in turn, which get what a loaded machine leaves
async def test_the_adapter_is_that_of_an_undisturbed_run(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    model = make_served_model(tmp_path / "model")
    draw = random.Random(31)
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(bus, nats_settings, tmp_path, stack)
        await cluster.begin("monitor", "services.health_monitor", "--gone-after", "2")
        await cluster.begin("scheduler", "services.scheduler")

        async def host(name: str) -> None:
            arguments = (
                "--takes-models",
                "--device",
                "cpu",
                "--dtype",
                "fp32",
                "--model-cache",
                str(tmp_path / "cache"),
            )
            await cluster.begin(
                name,
                EAGER_EXECUTOR,
                *arguments,
                "--training-state-interval",
                "0",
                "--fork-server",
                "off",
            )

        await host("host-0")
        await cluster.submit("calm", **job_fields(model))
        calm = await cluster.until("calm", lambda job: job.result is not None or job.status == "failed")
        assert calm.result is not None, calm.error
        await cluster.submit("hit", **job_fields(model))
        at = 0
        for number in range(KILLS):
            at += draw.randrange(2, 6)
            job = await cluster.until("hit", trained_to(at))
            await cluster.processes[job.host].end(signal.SIGKILL)
            await host(f"host-{number + 1}")
        hit = await cluster.until("hit", lambda job: job.result is not None)
        assert hit.attempt > KILLS
        assert hit.result is not None
        assert hit.result.digest == calm.result.digest
        assert [(one.step, one.digest) for one in hit.adapters] == [
            (one.step, one.digest) for one in calm.adapters
        ]
        files = tmp_path / "files"
        files.mkdir()
        await AdapterFiles(bus).fetch(hit.result.digest, files)
        assert (files / WEIGHTS).stat().st_size >= hit.result.bytes > 0
        assert msgspec.json.decode((files / CONFIG).read_bytes())["r"] == 4
        rows = [await cluster.objects.get(name) for name in (hit.metrics_object, calm.metrics_object)]
        assert rows[0] == rows[1]


def trained_to(step: int) -> Callable[[TrainingJob], bool]:
    """Whether some host has it, and has stored a state of that step or a later one."""
    return lambda job: job.host != "" and job.state is not None and job.state.step >= step


def job_fields(model: Path) -> dict[str, Any]:
    chosen = Hyperparameters(
        epochs=EPOCHS,
        batch_size=BATCH,
        learning_rate_multiplier=1.0,
        beta=0.1,
        rank=4,
        alpha=8.0,
        dropout=0.1,
    )
    return {
        "examples": EXAMPLES,
        "model": MODEL,
        "base": ModelSpec(MODEL, str(model)),
        "tokens": 10,
        "hyperparameters": msgspec.structs.replace(chosen, max_tokens=CONTEXT),
        "steps": EPOCHS * EXAMPLES // BATCH,
    }
