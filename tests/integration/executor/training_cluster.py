"""A cluster that trains with stub trainers: a real NATS, health monitor, scheduler, and executors, each a process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from shared.config import CommonSettings
from shared.messages import Heartbeat, HostTraining, ModelSpec
from shared.messages.training import Examples, Hyperparameters, TokenizedData, TrainingData, TrainingEvent, TrainingJob
from shared.nats.bus import Bus
from shared.nats.training import TrainingEvents, training_jobs, training_objects
from tests.processes import ServiceProcess, service_process

TENANT = "acme"
EAGER_EXECUTOR = "tests.integration.executor.eager_training"
SOON = 180.0  # seconds in which what is to happen happens, on a machine that has other work


def data_of(examples: int, tokens: int = 4, vocabulary: int = 250) -> TrainingData:
    """So many examples of so many tokens."""
    numbers = b"".join((n * 7 % vocabulary).to_bytes(4, "little") for n in range(examples * tokens))
    lengths = tokens.to_bytes(4, "little") * examples
    return TrainingData(Examples(numbers, b"\x01" * (examples * tokens), lengths))


class Cluster:
    def __init__(self, bus: Bus, settings: CommonSettings, directory: Path, stack: contextlib.AsyncExitStack) -> None:
        self.bus = bus
        self.jobs = training_jobs(bus)
        self.objects = training_objects(bus)
        self.events = TrainingEvents(bus)
        self.processes: dict[str, ServiceProcess] = {}
        self._settings = settings
        self._directory = directory
        self._stack = stack
        self.python = ""  # of the environment that services are started in from now on; empty: of this one

    async def begin(self, name: str, module: str, *arguments: str) -> ServiceProcess:
        """A service; ended with the cluster."""
        process = await self._stack.enter_async_context(
            service_process(
                self.bus, self._settings, module, self._directory, *arguments, instance=name, python=self.python
            )
        )
        self.processes[name] = process
        await process.wait_for(lambda beat: beat.state == "ready")
        return process

    async def executor(self, name: str, *arguments: str, step_ms: float = 50.0) -> ServiceProcess:
        """One that serves the model `base` with a stub engine, and trains."""
        common = ("--engine", "stub", "--served-model-name", "base", "--stub-step-ms", str(step_ms))
        process = await self.begin(name, "services.executor", *common, "--handover-timeout", "0", *arguments)
        await process.wait_ready()
        return process

    async def submit(
        self, job: str, *, examples: int = 40, tokens: int = 4, model: str = "base", **fields: Any
    ) -> TrainingJob:
        """A job whose files a gateway has checked: 2 epochs of batches of 2."""
        name = f"{job}/examples"
        data = data_of(examples, tokens)
        await self.objects.open()
        await self.objects.put(name, msgspec.msgpack.encode(data))
        total = examples * tokens
        values: dict[str, Any] = {
            "status": "queued",
            "base": ModelSpec(model, ""),
            "data": TokenizedData(name, examples, total, total, tokens),
            "hyperparameters": Hyperparameters(epochs=2, batch_size=2, rank=4),
            "steps": examples,
            **fields,
        }
        tenant = values.pop("tenant", TENANT)
        made = TrainingJob(job, tenant, time.time(), model, "supervised", "file-1", "file-1", 7, **values)
        await self.jobs.ensure()
        await self.jobs.create(tenant, job, made)
        return made

    async def job(self, job: str, tenant: str = TENANT) -> TrainingJob:
        entry = await self.jobs.get(tenant, job)
        return entry.value

    async def until(self, job: str, holds: Callable[[TrainingJob], bool], tenant: str = TENANT) -> TrainingJob:
        """Waits for the job's record to be so."""
        last: TrainingJob | None = None
        try:
            async with asyncio.timeout(SOON):
                async for update in self.jobs.watch_revisions():
                    if update is not None and (found := update[1]) is not None and found.id == job:
                        last = found
                        if found.tenant == tenant and holds(found):
                            return found
        except TimeoutError:
            logs = "\n".join(process.logged_last() for process in self.processes.values())
            raise AssertionError(f"waited {SOON:g} s; the job was {last}\n{logs}") from None
        raise AssertionError("the watcher has ended")

    async def change(self, job: str, change: Callable[[TrainingJob], TrainingJob]) -> None:
        while True:
            entry = await self.jobs.get(TENANT, job)
            if await self.jobs.update(entry.key, change(entry.value), entry.revision) is not None:
                return

    async def until_said(self, job: str, kind: str) -> TrainingEvent:
        """Waits for such an event of the job."""
        await self.events.ensure()
        async with asyncio.timeout(SOON):
            async for entry in self.events.follow(TENANT, job):
                if entry is not None and entry.value.kind == kind:
                    return entry.value
        raise AssertionError("the watcher has ended")

    async def said(self, job: str) -> list[TrainingEvent]:
        return [entry.value async for entry in self.events.of(TENANT, job)]

    async def left(self, job: str) -> list[str]:
        """Objects of the job that a host has written."""
        return [name for name in await self.objects.names() if name.startswith(f"{job}/") and name.count("/") > 1]

    def trainer(self, executor: str) -> psutil.Process:
        """The only one that the executor has."""
        children = psutil.Process(self.processes[executor].process.pid).children(recursive=True)
        [trainer] = [child for child in children if any("training" in word for word in child.cmdline())]
        return trainer

    async def trains(self, executor: str, job: str, attempt: int = 1) -> HostTraining:
        """Waits until the executor says that its trainer computes the job: this attempt, or a later one."""

        def found(beat: Heartbeat) -> HostTraining | None:
            trainings = beat.host.trainings if beat.host is not None else []
            of_job = (one for one in trainings if one.job == job and one.attempt >= attempt)
            return next((one for one in of_job if one.state == "training"), None)

        training = found(await self.processes[executor].wait_for(lambda beat: found(beat) is not None))
        assert training is not None
        return training


@contextlib.asynccontextmanager
async def cluster_of(
    bus: Bus, settings: CommonSettings, directory: Path, *executors: str, step_ms: float = 50.0
) -> AsyncIterator[Cluster]:
    """A health monitor, a scheduler, and these executors."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(bus, settings, directory, stack)
        await cluster.begin("monitor", "services.health_monitor", "--gone-after", "2")
        await cluster.begin("scheduler", "services.scheduler")
        for name in executors:
            await cluster.executor(name, step_ms=step_ms)
        yield cluster
