"""What a host does with fine-tuning jobs, seen from inside: a real NATS, real stub trainers, no scheduler."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.activity import ActivityPage, HostActivity
from services.executor.ipc.trainer_pipe import TrainerFailed
from services.executor.supervisor.host.memory import HostMemory
from services.executor.supervisor.trainings import trainer_process, training
from services.executor.supervisor.trainings.host_trainings import STUB_BYTES, HostTrainings, TrainingSettings
from services.executor.supervisor.trainings.job_changes import MOST_CRASHES
from shared.config import load_settings, with_sections
from shared.errors import InvalidRequest, ModelNotStored, Unavailable
from shared.messages import HostReply, ModelSpec, StartTraining, StopTraining
from shared.messages.training import (
    Hyperparameters,
    TokenizedData,
    TrainedAdapter,
    TrainingJob,
    TrainingMetrics,
    TrainingState,
)
from shared.nats.bus import Bus
from shared.nats.tenants import tenant_key
from shared.nats.training import training_jobs, training_objects
from tests.integration.executor.training_cluster import data_of
from tests.processes import until_status
from tests.unit.executor.model.lanes import in_lanes

STEPS = 20
SETTINGS = with_sections(ExecutorSettings, [TrainingSettings])


class Service:
    """The executor around it, and its models."""

    def __init__(self, bus: Bus, page: Path, instance: str) -> None:
        self.bus = bus
        self.instance = instance
        self.activity: ActivityPage | None = ActivityPage(page, lambda: self.on_request())
        self.on_request: Callable[[], None] = lambda: None
        self.ready = asyncio.Event()
        self.ready.set()
        self.settings = load_settings(SETTINGS, engine="stub", served_model_name="base", stub_step_ms=20.0, trains=2)

    def step_ms(self, value: float) -> None:
        """Of trainers that begin from now on, where the base has a source."""
        self.settings = self.settings.model_copy(update={"stub_step_ms": value})

    async def beat_now(self) -> None:
        raise Unavailable("Nobody listens.")

    def settings_of(self, spec: ModelSpec) -> ExecutorSettings:
        return self.settings

    async def prepare_base(self, settings: ExecutorSettings) -> str:
        await self.ready.wait()
        return settings.model

    def serves(self, model: str) -> bool:
        return True

    def gpu_variables(self, devices: Iterable[int]) -> dict[str, str]:
        return {}


class Host:
    def __init__(self, bus: Bus, page: Path, memory: int = 2 * STUB_BYTES, name: str = "h") -> None:
        self.service = Service(bus, page, name)
        self.memory = HostMemory([memory], gpus=False)
        self.trainings = HostTrainings(self.service.settings, self.service, self.memory, self.service)
        self.service.on_request = self.trainings.on_request
        self.jobs, self.objects = training_jobs(bus), training_objects(bus)
        self._page = HostActivity(page)

    async def submit(self, name: str, **fields: Any) -> TrainingJob:
        await self.jobs.ensure()
        await self.objects.open()
        await self.objects.put(f"{name}-examples", msgspec.msgpack.encode(data_of(STEPS)))
        values: dict[str, Any] = {
            "status": "queued",
            "host": "h",
            "attempt": 1,
            "base": ModelSpec("base", ""),
            "data": TokenizedData(f"{name}-examples", STEPS, 4 * STEPS, 4 * STEPS, 4),
            "hyperparameters": Hyperparameters(epochs=1, batch_size=1, rank=4),
            **fields,
        }
        job = TrainingJob(name, "t", time.time(), "base", "supervised", "f", "f", 3, **values)
        await self.jobs.create("t", name, job)
        return job

    async def begin(self, name: str, attempt: int = 1) -> HostReply:
        return await self.trainings.start(StartTraining(name, "t", attempt))

    async def job(self, name: str) -> TrainingJob:
        entry = await self.jobs.get("t", name)
        return entry.value

    async def change(self, name: str, **fields: Any) -> None:
        while True:
            entry = await self.jobs.get("t", name)
            changed = msgspec.structs.replace(entry.value, **fields)
            if await self.jobs.update(entry.key, changed, entry.revision) is not None:
                return

    async def again(self, name: str) -> None:
        """As the scheduler would."""
        attempt = (await self.job(name)).attempt + 1
        await self.change(name, host="h", attempt=attempt)
        assert (await self.begin(name, attempt)).ok

    async def until(self, name: str, state: str) -> None:
        """Waits until the host says so of the job; empty: it has it no more."""
        async with asyncio.timeout(60):
            while [one.state for one in self.trainings.report() if one.job == name] != [state] * bool(state):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def ask(self, requests: int) -> None:
        """So many wait for an answer from now on; as a leader tells it."""
        self._page.set(3, requests)
        if requests and self._page.is_armed:
            page = self.service.activity
            page.on_request()
            self._page.disarm()

    async def until_step(self, name: str) -> None:
        """Waits until its trainer has made one."""
        async with asyncio.timeout(60):
            while not any(one.job == name and one.step for one in self.trainings.report()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_armed(self) -> None:
        """Waits until it is to be told of the next request."""
        async with asyncio.timeout(60):
            while not self._page.is_armed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def yielded(self) -> float:
        """Seconds, by its metrics."""
        return self._metric("training_yield_seconds")

    def stalled(self) -> float:
        """The same."""
        return self._metric("training_stalled_seconds")

    def _metric(self, name: str) -> float:
        families = {family.name: family for family in self.trainings.metrics.collect()}
        return float(families[f"ryzanstein_executor_{name}"].samples[0].value)

    def trainer(self, name: str) -> int:
        process = self.trainings._trainings[tenant_key("t", name)]._process
        return process.pid


@pytest.fixture
async def host(bus: Bus, tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(bus, tmp_path / "page")
    yield made
    await made.trainings.stop()


async def test_what_it_does_not_take_is_refused_by_name(host: Host, bus: Bus, tmp_path: Path) -> None:
    await host.submit("other", host="i")
    assert (await host.begin("other")).ok, "it is another's: there is nothing to do"
    assert (await host.begin("nobody")).ok
    assert not host.trainings.report()
    await host.submit("elsewhere", base=ModelSpec("another", ""))
    with pytest.raises(ModelNotStored, match="was not started with another"):
        await host.begin("elsewhere")
    await host.submit("wide", hyperparameters=Hyperparameters(epochs=1, batch_size=1, rank=65))
    with pytest.raises(InvalidRequest, match="up to the rank 64, and the job's has 65"):
        await host.begin("wide")
    host.service.ready.clear()
    for name in ("a", "b", "c"):
        await host.submit(name, base=ModelSpec("base", "org/base"))
    assert (await host.begin("a")).memory == STUB_BYTES
    assert (await host.begin("a")).ok, "it has it"
    assert (await host.begin("b")).ok
    with pytest.raises(Unavailable, match="has 2 fine-tuning jobs already"):
        await host.begin("c")
    small = Host(bus, tmp_path / "other", STUB_BYTES - 1)
    reply = await small.begin("c")
    assert (reply.ok, reply.code, reply.memory) == (False, "model_does_not_fit", STUB_BYTES)
    assert not small.trainings.report()
    await host.trainings.stop()
    assert (await host.job("a")).waiting_for == "The executor h was stopped."
    with pytest.raises(InvalidRequest, match="RYZANSTEIN_TRAINS"):
        await host.begin("c")


async def test_while_it_is_made_ready_it_is_ended_at_once(host: Host) -> None:
    host.service.ready.clear()
    for name in ("moved", "unwanted", "replaced"):
        await host.submit(name)
    assert (await host.begin("moved")).ok
    assert (await host.begin("unwanted")).ok
    await host.change("moved", host="i", attempt=2)
    await host.change("unwanted", wanted="cancel")
    for name in ("moved", "unwanted"):
        assert (await host.trainings.end(StopTraining(name, "t", 1))).ok
        await host.until(name, "")
    assert (await host.job("moved")).host == "i"
    assert (await host.job("unwanted")).status == "cancelled"
    assert (await host.begin("replaced")).ok
    await host.change("replaced", attempt=2)
    assert (await host.begin("replaced", 2)).ok, "the older one ends first; it is told again"
    await host.until("replaced", "")
    await host.submit("paused", wanted="pause")
    assert (await host.begin("paused")).ok
    await host.until("paused", "")
    assert (await host.job("paused")).status == "paused"


@pytest.mark.slow
async def test_after_a_crash_it_goes_on_with_what_is_there_and_removes_what_was_left(host: Host) -> None:
    await host.submit("calm")
    assert (await host.begin("calm")).ok
    await host.until("calm", "")
    calm = await host.job("calm")
    assert calm.result is not None
    assert calm.adapters == []

    old = [TrainedAdapter(step, "0" * 64, 4, 1, 1, TrainingMetrics(step)) for step in (1, 2, 3)]
    await host.submit("hit", hyperparameters=Hyperparameters(epochs=2, batch_size=2, rank=4), adapters=old)
    host.ask(1)
    assert (await host.begin("hit")).ok, "it is suspended as soon as it is started"
    await host.until("hit", "yielding")
    os.kill(host.trainer("hit"), signal.SIGKILL)
    await host.until("hit", "")
    crashed = await host.job("hit")
    assert (crashed.host, crashed.retry_at > time.time() - 60) == ("", True)
    assert "signal SIGKILL" in crashed.waiting_for
    host.ask(0)
    await host.objects.put("hit/1/state-99", b"left")
    await host.objects.put("hit/7/state-1", b"of a later attempt")
    await host.change("hit", state=TrainingState(5, "hit/1/gone", 1, "d"))
    await host.again("hit")
    await host.until("hit", "")
    done = await host.job("hit")
    assert done.result is not None, done
    assert [one.step for one in done.adapters] == [2, 3, 10], "the oldest has made way"
    assert await host.objects.info("hit/1/state-99") is None
    assert await host.objects.info("hit/7/state-1") is not None
    families = {family.name: family for family in host.trainings.metrics.collect()}
    ends = {sample.labels["result"]: sample.value for sample in families["ryzanstein_executor_training_ends"].samples}
    assert (ends["crashed"], ends["finished"]) == (1, 2)
    assert families["ryzanstein_executor_training_steps"].samples[0].value == 2 * STEPS
    assert families["ryzanstein_executor_training_yield_seconds"].samples[0].value > 0


@pytest.mark.slow
async def test_paused_and_resumed_it_makes_the_same(host: Host) -> None:
    eight_steps = Hyperparameters(epochs=4, batch_size=STEPS // 2, rank=4)  # a state after every other one
    chosen: dict[str, Any] = {"hyperparameters": eight_steps, "base": ModelSpec("base", "org/base")}
    host.service.step_ms(1.0)
    await host.submit("calm", **chosen)
    assert (await host.begin("calm")).ok
    await host.until("calm", "")
    host.service.step_ms(700.0)
    await host.submit("job", **chosen)
    assert (await host.begin("job")).ok
    async with asyncio.timeout(60):
        while (await host.job("job")).state is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await host.change("job", wanted="pause")
    assert (await host.trainings.end(StopTraining("job", "t", 1))).ok
    await host.until("job", "")
    paused = await host.job("job")
    assert (paused.status, 2 <= paused.state.step < 8) == ("paused", True)
    host.service.step_ms(1.0)
    await host.change("job", status="queued", wanted="run")
    await host.again("job")
    await host.until("job", "")
    calm, done = await host.job("calm"), await host.job("job")
    assert done.result.digest == calm.result.digest
    assert len(done.adapters) == 3


async def test_a_state_that_is_another_is_not_gone_on_with(host: Host) -> None:
    await host.submit("job", state=TrainingState(5, "job/0/state", 3, "d"))
    await host.objects.put("job/0/state", b"bad")
    assert (await host.begin("job")).ok
    await host.until("job", "")
    job = await host.job("job")
    assert job.result is not None, job
    assert job.state.step == STEPS


async def test_a_model_gets_its_memory_and_the_job_keeps_its_state(host: Host) -> None:
    await host.submit("job", hyperparameters=Hyperparameters(epochs=50, batch_size=1, rank=4))
    assert (await host.begin("job")).ok
    await host.until_step("job")
    trainer = host.trainer("job")
    host.ask(1)
    await host.until("job", "yielding")
    await host.trainings.evict([tenant_key("t", "job"), "nobody"])
    assert not psutil.pid_exists(trainer)
    await host.until("job", "")
    job = await host.job("job")
    assert (job.host, job.waiting_for) == ("", "The executor h needs its memory for a model.")
    assert job.retry_at > time.time()
    assert job.state is not None
    assert host.memory.place_job("x", 2 * STUB_BYTES) == ()


async def test_a_trainer_that_never_runs_fails_the_job_with_its_last_words(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "STUB", "services.executor.training.no_such_module")
    await host.submit("job", crashes=MOST_CRASHES - 1)
    assert (await host.begin("job")).ok
    await host.until("job", "")
    job = await host.job("job")
    assert (job.status, job.host) == ("failed", "")
    assert "No module named services.executor.training.no_such_module" in job.error.message
    empty = msgspec.msgpack.encode(data_of(0))
    monkeypatch.undo()
    await host.submit("empty")
    await host.objects.put("empty-examples", empty)
    assert (await host.begin("empty")).ok
    await host.until("empty", "")
    failed = await host.job("empty")
    assert (failed.status, failed.error.code) == ("failed", "invalid_request")
    assert (await host.objects.get("job-examples")) != empty, "nothing is changed of another's"


@pytest.fixture
async def helper(host: Host, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    """A second one; trainers of both wait for each other."""
    monkeypatch.setattr(trainer_process, "STUB", "tests.integration.executor.parted_trainer")
    made = Host(bus, tmp_path / "helper", name="i")
    yield made
    await made.trainings.stop()


PARTED: dict[str, Any] = {
    "helpers": ["i"],
    "hyperparameters": Hyperparameters(epochs=1, batch_size=1, rank=4, replicas=2),
}


async def ends_of(host: Host) -> dict[str, float]:
    families = {family.name: family for family in host.trainings.metrics.collect()}
    samples = families["ryzanstein_executor_training_ends"].samples
    return {sample.labels["result"]: sample.value for sample in samples if sample.value}


async def left_by(host: Host, helper: Host) -> TrainingJob:
    """The job once neither has it any more."""
    await host.until("job", "")
    await helper.until("job", "")
    return await host.job("job")


async def stand_still(host: Host, helper: Host) -> None:
    """Begins a long job on both, whose first trainer is suspended after some steps; the other one waits for it."""
    long = msgspec.structs.replace(PARTED["hyperparameters"], epochs=500)
    await host.submit("job", **{**PARTED, "hyperparameters": long})
    assert (await helper.begin("job")).ok
    assert (await host.begin("job")).ok
    await host.until_step("job")
    await helper.until("job", "training")
    host.ask(1)
    await host.until("job", "yielding")


@pytest.mark.slow
async def test_two_hosts_train_a_job_and_the_first_one_writes(host: Host, helper: Host) -> None:
    host.ask(1)
    await host.submit("job", **PARTED)
    assert (await helper.begin("job")).ok, "it waits for the first one"
    await helper.until("job", "loading")
    assert (await host.begin("job")).ok
    await host.until("job", "yielding")
    assert [one.replica for one in (*host.trainings.report(), *helper.trainings.report())] == [0, 1]
    host.ask(0)
    job = await left_by(host, helper)
    assert job.result is not None, job
    assert (job.attempt, job.crashes, job.result.step) == (1, 0, STEPS)
    assert (await ends_of(host), await ends_of(helper)) == ({"finished": 1}, {"left": 1})


@pytest.mark.parametrize("dies", in_lanes(["first", "further"], ["first"]))
async def test_where_a_replica_dies_the_attempt_ends_for_both(host: Host, helper: Host, dies: str) -> None:
    await stand_still(host, helper)
    os.kill((host if dies == "first" else helper).trainer("job"), signal.SIGKILL)
    host.ask(0)
    job = await left_by(host, helper)
    assert (job.host, job.attempt, job.crashes) == ("", 1, 1)
    assert dies == "further" or "signal SIGKILL" in job.waiting_for


@pytest.mark.slow
async def test_where_only_the_connection_breaks_the_first_one_writes_it(
    host: Host, helper: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "WORD_WITHIN", 0.1)
    await stand_still(host, helper)
    for one in (host, helper):  # what trainers say then
        gone = one.trainings._trainings[tenant_key("t", "job")]
        gone._failure = TrainerFailed(Unavailable.code, "Another replica of the job is gone.")
        os.kill(one.trainer("job"), signal.SIGKILL)
    job = await left_by(host, helper)
    assert (job.host, job.crashes) == ("", 1)
    assert "Another replica of the job is gone." in job.waiting_for


@pytest.mark.slow
async def test_a_further_replica_gives_its_part_back_without_a_fault(host: Host, helper: Host) -> None:
    await stand_still(host, helper)
    await helper.trainings.evict([tenant_key("t", "job")])
    job = await left_by(host, helper)
    assert (job.host, job.crashes) == ("", 0)
    assert job.waiting_for == "The executor i needs its memory for a model."


async def test_a_pause_of_two_is_that_of_the_first(host: Host, helper: Host) -> None:
    await stand_still(host, helper)
    await host.change("job", wanted="pause")
    for one in (helper, host):
        assert (await one.trainings.end(StopTraining("job", "t", 1))).ok
    job = await left_by(host, helper)
    assert (job.status, job.crashes) == ("paused", 0)


async def test_where_the_state_is_lost_to_a_further_replica_alone_the_attempt_ends(host: Host, helper: Host) -> None:
    lost = TrainingState(5, "job/0/state", 3, "d")
    await host.submit("job", state=lost, meeting="127.0.0.1:9", **PARTED)
    assert (await helper.begin("job")).ok
    await helper.until("job", "")
    job = await host.job("job")
    assert job.state == lost
    assert "could not read the job's state" in job.waiting_for


async def test_ranks_of_a_group_train_no_part_of_a_job(host: Host) -> None:
    host.service.settings = host.service.settings.model_copy(update={"tp": 2})
    await host.submit("job", **{**PARTED, "base": ModelSpec("base", "org/base")})
    with pytest.raises(InvalidRequest, match="has 2 ranks here"):
        await host.begin("job")


async def test_all_of_a_host_are_suspended_at_once_and_go_on_when_it_is_idle(host: Host) -> None:
    long = Hyperparameters(epochs=500, batch_size=1, rank=4)
    for name in ("a", "b"):
        await host.submit(name, hyperparameters=long)
        assert (await host.begin(name)).ok
        await host.until_step(name)
    await host.until_armed()
    host.ask(1)
    assert [one.state for one in host.trainings.report()] == ["yielding", "yielding"], "before anything else runs"
    pids = [host.trainer(name) for name in ("a", "b")]
    for pid in pids:
        await until_status(pid, psutil.STATUS_STOPPED)
    counted, stalled = host.yielded(), host.stalled()
    assert counted > 0, "before they go on"
    assert host.stalled() == stalled, "what is suspended is not stuck"
    host.ask(0)
    for name, pid in zip(("a", "b"), pids, strict=True):
        await host.until(name, "training")
        await until_status(pid, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    assert host.yielded() > counted
    await host.until_armed()
    host.ask(1)
    assert [one.state for one in host.trainings.report()] == ["yielding", "yielding"], "once more"
    await host.trainings.stop()
    for name in ("a", "b"):
        job = await host.job(name)
        assert (job.waiting_for, job.crashes) == ("The executor h was stopped.", 0)
        assert job.state is not None, "it was continued, to write what it had"


async def test_what_nobody_needs_any_more_is_killed_while_it_is_suspended(host: Host) -> None:
    host.ask(1)
    for name, wanted in (("cancelled", "cancel"), ("paused", "pause")):
        await host.submit(name)
        assert (await host.begin(name)).ok
        await host.until(name, "yielding")
        pid = host.trainer(name)
        await host.change(name, wanted=wanted)
        assert (await host.trainings.end(StopTraining(name, "t", 1))).ok
        await host.until(name, "")
        assert not psutil.pid_exists(pid)
        job = await host.job(name)
        assert (job.status, job.state, job.crashes) == (name, None, 0), "it had not begun: there is nothing to write"
