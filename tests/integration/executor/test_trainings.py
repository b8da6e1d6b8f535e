"""Fine-tuning jobs on hosts: whoever dies, they go on from the last state and end in the same adapter, once."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from services.executor.supervisor.host.memory import RANK_OVERHEAD
from services.executor.supervisor.trainings.job_changes import MOST_CRASHES
from shared.config import CommonSettings
from shared.messages import (
    DispatchBatch,
    DispatchReply,
    GenerationRequest,
    HostReply,
    LoadModel,
    ModelSettings,
    ModelSpec,
    SamplingParams,
)
from shared.messages.training import TrainingJob
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from tests.integration.executor.training_cluster import Cluster, cluster_of


@pytest.fixture
async def cluster(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(bus, nats_settings, tmp_path, "one") as made:
        yield made


def done(job: TrainingJob) -> bool:
    return job.result is not None


@pytest.mark.slow
async def test_a_job_is_trained_told_of_and_stored(cluster: Cluster) -> None:
    await cluster.submit("job", examples=20)
    job = await cluster.until("job", done)
    assert (job.status, job.host, job.attempt, job.crashes, job.waiting_for) == ("running", "", 1, 0, "")
    assert (job.steps, job.trained_tokens, job.threads > 0) == (20, 20, True)
    assert [adapter.step for adapter in job.adapters] == [10]
    assert await AdapterFiles(cluster.bus).has(job.result.digest)
    assert sorted(await cluster.left("job")) == sorted([job.state.object_name, job.metrics_object])
    assert (await cluster.objects.get(job.metrics_object)).count(b"\n") == 21
    said = await cluster.said("job")
    assert [event.metrics.step for event in said if event.metrics is not None] == [*range(1, 21)]
    assert "Step 20/20: training loss=0.1" in [event.message for event in said]
    beat = await cluster.processes["one"].wait_for(lambda beat: beat.host is not None and not beat.host.trainings)
    assert beat.host.trains == 1


@pytest.mark.slow
async def test_what_its_tenant_wants_is_done_between_two_steps(cluster: Cluster) -> None:
    await cluster.submit("job", examples=400)
    await cluster.trains("one", "job")
    await cluster.change("job", lambda job: msgspec.structs.replace(job, wanted="pause"))
    paused = await cluster.until("job", lambda job: job.status == "paused")
    assert (paused.host, paused.state.step < paused.steps) == ("", True)
    await cluster.change("job", lambda job: msgspec.structs.replace(job, wanted="run", status="queued"))
    assert (await cluster.trains("one", "job", attempt=2)).attempt == 2
    await cluster.change("job", lambda job: msgspec.structs.replace(job, wanted="cancel"))
    cancelled = await cluster.until("job", lambda job: job.status == "cancelled")
    assert (cancelled.host, cancelled.result, cancelled.finished_at > 0) == ("", None, True)
    assert (await cluster.until_said("job", "job_paused")).message == "Fine-tuning job paused"
    await cluster.until_said("job", "job_cancelled")


@pytest.mark.slow
async def test_a_trainer_that_dies_is_started_again_and_not_for_ever(cluster: Cluster) -> None:
    await cluster.submit("job", examples=80)
    await cluster.trains("one", "job")
    cluster.trainer("one").kill()
    crashed = await cluster.until("job", lambda job: bool(job.crashes))
    assert crashed.host == ""
    assert "signal SIGKILL" in crashed.waiting_for
    again = await cluster.until("job", lambda job: job.attempt == 2)
    assert again.waiting_for == ""
    assert (await cluster.until("job", done)).crashes == 0

    await cluster.submit("poison", crashes=MOST_CRASHES - 1, host="nobody")
    await cluster.objects.delete("poison/examples")
    failed = await cluster.until("poison", lambda job: job.status == "failed")
    assert failed.error.code == "internal_error"
    assert f"{MOST_CRASHES} times after step 0. The job's examples are gone" in failed.error.message


@pytest.mark.slow
async def test_interactive_requests_go_first(cluster: Cluster) -> None:
    await cluster.submit("job", examples=400)
    await cluster.trains("one", "job")
    request = GenerationRequest("g", "g", "base", "me", [1, 2, 3], max_tokens=4000, sampling=SamplingParams(seed=1))
    reply = await cluster.bus.request(subjects.dispatch("one"), DispatchBatch([request]), DispatchReply, timeout=30)
    assert reply.accepted == ["g"], reply
    process = cluster.processes["one"]

    async def state(wanted: str) -> int:
        beat = await process.wait_for(
            lambda beat: beat.host is not None and [one.state for one in beat.host.trainings] == [wanted]
        )
        return beat.host.trainings[0].step

    stood = await state("yielding")
    ranks = [rank.pid for group in process.beats[-1].groups for rank in group.ranks]
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)  # the ring's slot is given back when it is gone
    assert await state("training") >= stood


@pytest.mark.slow
async def test_a_model_has_the_memory_of_a_job(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> None:
    kv = 1 << 20
    async with cluster_of(bus, nats_settings, tmp_path) as cluster:
        arguments = ("--takes-models", "--host-memory", str(RANK_OVERHEAD + kv), "--group", "own")
        await cluster.executor("one", *arguments)
        await cluster.submit("job", examples=400)
        await cluster.trains("one", "job")
        spec = ModelSpec("m", "stub", settings=ModelSettings(kv_memory=kv))
        reply = await bus.request(subjects.host_control("one"), LoadModel("m-group", spec), HostReply, timeout=30)
        assert reply.ok, reply
        waiting = await cluster.until("job", lambda job: job.waiting_for != "")
        assert "needs its memory for a model" in waiting.waiting_for
        assert waiting.state is not None
        await cluster.processes["one"].wait_for(
            lambda beat: "m-group" in [group.group for group in beat.groups if group.state == "ready"]
        )
