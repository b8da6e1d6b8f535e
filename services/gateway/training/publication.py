"""What becomes of what a host has trained: names of adapters, result files, the job's end.

    adapter of an epoch's end   ──▶ KV `adapters`  ...:ckpt-step-N        an older one that the job has dropped goes
    result                      ──▶ KV `adapters`  ft:...                 leaders fetch what is registered ahead
    metrics (CSV)               ──▶ a file of the tenant
    then                            status succeeded, in one write
    then                            examples, states, metrics are deleted

Each part can be done again: names and ids follow from the job, and adapters lie under their digest. So whoever takes
the job over, wherever its gateway was killed, ends with the same; what is said of a part is said before the part is
done. An adapter is its tenant's alone.
"""

import contextlib
import time
from typing import Any

import structlog

from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.errors import QuotaExceeded, RouteError
from services.gateway.files.files import Files
from services.gateway.jobs.leases import JobLease
from services.gateway.training import states
from services.gateway.training.objects import adapter_record, checkpoint_name, event_of, model_name
from services.gateway.training.preparation import object_name
from shared.errors import StorageFull
from shared.messages.batches import FileRecord
from shared.messages.training import TRAINING_OVER, TrainedAdapter, TrainingError, TrainingJob
from shared.nats.objects import MissingObject, Objects
from shared.nats.training import TrainingEvents, clear_objects

log = structlog.get_logger(__name__)

RESULTS = "fine-tune-results"  # purpose of result files
FILENAME = "step_metrics.csv"
# Seconds for which writing a result file is tried while there is no room for it: then the job succeeds without.
FILES_WITHIN = 600.0


class _NoPlace(Exception):
    """The registry takes no further adapter."""

    def __init__(self, error: TrainingError) -> None:
        super().__init__(error.message)
        self.error = error


class Publication:
    """One per gateway."""

    def __init__(self, adapters: AdapterRegistry, files: Files, events: TrainingEvents, objects: Objects) -> None:
        """`objects`: what jobs train with."""
        self._adapters = adapters
        self._files = files
        self._events = events
        self._objects = objects

    async def publish(self, lease: JobLease[TrainingJob]) -> None:
        """Everything that is to be done now. Raises `LeaseLost`, and `RyzansteinError` where it is tried again."""
        wanted = states.settled(lease.job, time.time())
        if wanted.status != lease.job.status:
            await self._say(wanted, f"job_{wanted.status}", f"Fine-tuning job {wanted.status}")
        job = await lease.write(lambda known: states.settled(known, time.time()))
        try:
            for adapter in job.adapters:
                if not adapter.name:
                    await self._publish_checkpoint(lease, adapter)
            if lease.job.result is not None and lease.job.status not in TRAINING_OVER:
                await self._publish_result(lease, lease.job.result)
        except _NoPlace as full:
            await self._fail(lease, full.error)
        if lease.job.status in TRAINING_OVER and not lease.job.clean:
            await self._clean(lease)

    async def _publish_checkpoint(self, lease: JobLease[TrainingJob], adapter: TrainedAdapter) -> None:
        name = checkpoint_name(lease.job, adapter)
        await self._register(lease, adapter, name)
        await self._say(
            lease.job,
            "checkpoint",
            f"Checkpoint created at step {adapter.step} with Snapshot ID: {name}",
            step=adapter.step,
        )
        await self._remove_dropped(await lease.write(lambda known: states.named(known, adapter, name)))

    async def _remove_dropped(self, job: TrainingJob) -> None:
        """Checkpoints that the job keeps no more, names and files: a host keeps the last ones."""
        kept = {checkpoint_name(job, one) for one in job.adapters} | {model_name(job)}
        for name, record in list(self._adapters.records.items()):
            if record.job == job.id and name not in kept:
                with contextlib.suppress(RouteError):  # another gateway was first
                    await self._adapters.discard(name, job.tenant)

    async def _publish_result(self, lease: JobLease[TrainingJob], result: TrainedAdapter) -> None:
        name = model_name(lease.job)
        await self._register(lease, result, name)
        files = await self._result_files(lease.job)
        job = await lease.write(lambda known: states.succeeded(known, time.time(), name, files))
        log.info("fine_tuning_job_succeeded", fine_tuning_job=job.id, tenant=job.tenant, model=name)

    async def _register(self, lease: JobLease[TrainingJob], adapter: TrainedAdapter, name: str) -> None:
        job = lease.job
        try:
            self._adapters.check_room(name, job.model)
        except RouteError as error:
            raise _NoPlace(TrainingError(error.reason, error.message)) from None
        await self._adapters.put(adapter_record(job, adapter, name), replace=True)

    async def _fail(self, lease: JobLease[TrainingJob], error: TrainingError) -> None:
        """Waiting would not help: somebody has to unload adapters."""
        if lease.job.status not in TRAINING_OVER:
            await self._say(lease.job, "job_failed", error.message, level="error")
        await lease.write(lambda job: states.unpublished(job, time.time(), error))
        log.info("fine_tuning_job_unpublished", fine_tuning_job=lease.job.id, code=error.code)

    # --- files -----------------------------------------------------------------------------------

    async def _result_files(self, job: TrainingJob) -> list[str]:
        if not job.metrics_object:
            return []
        file_id = f"file-{job.id.removeprefix(states.ID)}metrics"
        record = FileRecord(
            id=file_id,
            tenant=job.tenant,
            filename=FILENAME,
            purpose=RESULTS,
            created_at=time.time(),
            object_name=file_id,
        )
        try:
            await self._files.put(record, self._objects.read(job.metrics_object))
        except MissingObject:
            await self._say(job, "no_result_file", "The metrics of the steps are lost", level="warn")
            return []
        except (QuotaExceeded, StorageFull) as error:
            if not job.blocked_since or time.time() < job.blocked_since + FILES_WITHIN:
                raise
            said = f"There was no room for the result file for {FILES_WITHIN:g} s: {error.message}"
            await self._say(job, "no_result_file", said, level="warn")
            return []
        return [file_id]

    async def _clean(self, lease: JobLease[TrainingJob]) -> None:
        """Says that it has succeeded first: whoever follows its events reads on until it is clean."""
        job = lease.job
        if job.status == "succeeded":
            await self._say(job, "model_created", f"New fine-tuned model created: {job.fine_tuned_model}")
            await self._say(job, "job_succeeded", "The job has successfully completed")
        names = (object_name(job), job.state.object_name if job.state else "", job.metrics_object)
        for name in filter(None, names):
            await self._objects.delete(name)
        await clear_objects(self._objects, job.id)  # what attempts of hosts have left that died
        await self._remove_dropped(job)
        if job.attempt:
            await self._adapters.release_job(job.id)
        await lease.write(states.cleaned)

    async def _say(self, job: TrainingJob, kind: str, message: str, **more: Any) -> None:
        """`more`: as of `event_of`."""
        await self._events.add(job.tenant, event_of(job, kind, message, time.time(), **more))
