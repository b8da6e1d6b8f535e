"""A scheduler and a host in one: takes fine-tuning jobs, and writes their records as ADR 0031 has it."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import openai
from openai.types.fine_tuning import FineTuningJob

from services.gateway.jobs.leases import Jobs
from services.gateway.training.runner import fine_tuning_jobs
from shared.messages.training import TrainedAdapter, TrainingEvent, TrainingJob, TrainingMetrics
from shared.nats.adapters import job_holder
from shared.nats.bus import Bus
from shared.nats.training import TrainingEvents, training_objects
from tests.adapters import store_adapter
from tests.integration.gateway.fake_ring import MODEL

HOST = "host-1"
OVER = ("succeeded", "failed", "cancelled")
LINE = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
CSV = b"step,train_loss\n1,2.5\n2,1.5\n"


async def upload(client: openai.AsyncOpenAI, lines: int = 4, purpose: str = "fine-tune") -> str:
    data = "".join(json.dumps(LINE) + "\n" for _ in range(lines)).encode()
    file = await client.files.create(file=("examples.jsonl", data), purpose=purpose)  # type: ignore[arg-type]
    return file.id


async def submit(client: openai.AsyncOpenAI, **fields: object) -> FineTuningJob:
    """A job of two steps."""
    file = fields.pop("training_file", None) or await upload(client)
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4}}}
    given = {"model": MODEL, "training_file": file, "method": method, **fields}
    return await client.fine_tuning.jobs.create(**given)  # type: ignore[arg-type]


async def until_status(client: openai.AsyncOpenAI, job: str, *states: str) -> FineTuningJob:
    """The job once it is in one of `states`."""
    async with asyncio.timeout(40):
        while True:
            found = await client.fine_tuning.jobs.retrieve(job)
            if found.status in states:
                return found
            assert found.status not in OVER, found
            await asyncio.sleep(0.05)


class FakeTrainer:
    """Opened by `start`. Jobs are those of one tenant."""

    def __init__(self, bus: Bus, directory: Path, tenant: str = "") -> None:
        self.jobs: Jobs[TrainingJob] = fine_tuning_jobs(bus, 1)
        self.events = TrainingEvents(bus)
        self.objects = training_objects(bus)
        self.tenant = tenant
        self._bus, self._directory = bus, directory

    async def start(self) -> None:
        await self.jobs.bucket.ensure()
        await self.events.ensure()
        await self.objects.open()

    async def known(self, job: str) -> TrainingJob:
        found = await self.jobs.get(job, self.tenant)
        assert found is not None
        return found

    async def write(self, job: str, **fields: object) -> TrainingJob:
        changed = await self.jobs.change(job, self.tenant, lambda known: msgspec.structs.replace(known, **fields))
        assert changed is not None
        return changed

    async def until(self, job: str, holds: Callable[[TrainingJob], bool]) -> TrainingJob:
        async with asyncio.timeout(40):
            while True:
                found = await self.known(job)
                if holds(found):
                    return found
                await asyncio.sleep(0.05)

    async def take(self, job: str) -> TrainingJob:
        """As a scheduler gives it to a host, which begins."""
        known = await self.until(job, lambda one: one.status == "queued")
        return await self.write(job, host=HOST, attempt=known.attempt + 1, status="running", started_at=time.time())

    async def adapter(self, job: str, step: int, number: int) -> TrainedAdapter:
        holder = job_holder(job, step)
        digest = await store_adapter(self._bus, self._directory, number, holder=holder)
        return TrainedAdapter(step, digest, 8, 400, int(time.time()), _metrics(step))

    async def step(self, job: str, step: int) -> None:
        metrics = _metrics(step)
        known = await self.write(job, metrics=metrics)
        message = f"Step {step}/{known.steps}: training loss={metrics.train_loss:.2f}"
        await self.events.add(self.tenant, TrainingEvent(job, step, "step", "info", message, time.time(), metrics))

    async def checkpoint(self, job: str, step: int, number: int) -> None:
        made = await self.adapter(job, step, number)
        known = await self.known(job)
        await self.write(job, adapters=[*known.adapters, made][-3:])

    async def finish(self, job: str, number: int) -> TrainingJob:
        """The last step is done: what is left is to publish it."""
        known = await self.known(job)
        result, name = await self.adapter(job, known.steps, number), f"{job}/metrics.csv"
        await self.objects.put(name, CSV)
        return await self.write(job, result=result, metrics_object=name, trained_tokens=64)


def _metrics(step: int) -> TrainingMetrics:
    return TrainingMetrics(step, 3.0 - step / 2, 0.5, 1e-4, 1.0, 32 * step, 0.1, valid_loss=2.0)
