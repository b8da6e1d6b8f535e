"""Does for a fine-tuning job what a gateway has to do, under its lease: first its files are checked, later what a host
has trained is published. Each is repeated as a whole by whoever takes the job over.

    validating_files ── FilePreparation.prepare ──▶ queued | failed
    an adapter without a name, a result, nothing more to do ── Publication.publish ──▶ registered, succeeded, clean
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.gateway.core.metrics import PREFIX
from services.gateway.jobs.leases import JobLease, Jobs, JobTraits, LeaseLost
from services.gateway.jobs.runners import RunnerSpec
from services.gateway.training import states
from shared.errors import BrokerUnavailable, RyzansteinError
from shared.limits import KNOWN_TRAINING_JOBS, TENANT_TRAINING_JOBS
from shared.messages.training import TRAINING_OVER, TrainingJob
from shared.nats.bus import Bus
from shared.nats.training import TrainingEvents, training_jobs
from shared.tasks import cancel_all

log = structlog.get_logger(__name__)

# Jobs that one gateway prepares at a time: it reads the files of a few of them, most wait for their base.
PREPARED_AT_ONCE = 32
PUBLISHED_AT_ONCE = 8
BROKER_PAUSE = 0.5  # seconds before a step is tried again whose failure could not even be written
# Does what is to be done for a job. Raises `LeaseLost`, and `RyzansteinError` where it is tried again.
Step = Callable[[JobLease[TrainingJob]], Coroutine[Any, Any, None]]
TRAITS = JobTraits[TrainingJob](
    "fine_tuning_job",
    "fine-tuning jobs",
    lambda job: job.status in TRAINING_OVER,
    most=TENANT_TRAINING_JOBS,
    known=KNOWN_TRAINING_JOBS,
)


def fine_tuning_jobs(bus: Bus, most: int) -> Jobs[TrainingJob]:
    """`most`: jobs of a tenant that are not over."""
    events = TrainingEvents(bus)
    return Jobs(TRAITS, training_jobs(bus), most, lambda job: events.clear(job.tenant, job.id))


class FineTuningMetrics:
    """Registered on the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        named: dict[str, Any] = {"namespace": PREFIX, "registry": registry}
        self.preparing = Gauge(
            "fine_tuning_jobs_preparing", "Fine-tuning jobs whose files this gateway checks.", **named
        )
        self.publishing = Gauge(
            "fine_tuning_jobs_publishing", "Fine-tuning jobs of which this gateway publishes something.", **named
        )
        self.taken_over = Counter(
            "fine_tuning_jobs_taken_over", "Fine-tuning jobs taken over from lost gateways.", **named
        )


class TrainingRunner:
    """One job under one lease."""

    def __init__(self, lease: JobLease[TrainingJob], needs: Callable[[TrainingJob], bool], step: Step) -> None:
        """`step` does what `needs` finds to be done, or raises `RyzansteinError` to be tried again."""
        self._lease = lease
        self._needs = needs
        self._step = step
        self._idle = False  # whether somebody has written that there is nothing left to do
        self._working: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until there is nothing left to do, or nothing that can be done now: then the lease is given back with the
        time of the next try, and the place is another job's. Raises `LeaseLost`."""
        async with self._lease.renewed(told=self.news):
            while not self._idle and self._needs(self._lease.job):
                try:
                    await self._work()
                except RyzansteinError as error:
                    log.warning("fine_tuning_step_failed", fine_tuning_job=self._lease.job.id, error=str(error))
                    if await self._postponed(error):
                        return
                    await asyncio.sleep(BROKER_PAUSE)
        await self.release()

    async def _postponed(self, error: RyzansteinError) -> bool:
        """False while that cannot be written. Raises `LeaseLost`."""
        now, least = time.time(), error.retry_after or 0.0
        try:
            await self._lease.write(lambda job: states.postponed(job, now, error.message, least))
        except BrokerUnavailable:
            return False
        return True

    async def _work(self) -> None:
        """The step, unless it becomes needless."""
        self._working = asyncio.create_task(self._step(self._lease))
        try:
            await asyncio.wait([self._working])
        finally:
            await cancel_all([self._working])
            failed = None if self._working.cancelled() else self._working.exception()
        if failed is not None:
            raise failed

    async def release(self) -> None:
        """Another gateway may go on at once."""
        if self._lease.job.owner:
            with contextlib.suppress(LeaseLost, RyzansteinError):
                await self._lease.release()

    def news(self, job: TrainingJob) -> None:
        """Somebody has written the job: what is done for it may have become needless. Who ends the lease by what it
        writes goes on to its own end."""
        self._idle = job.owner == self._lease.owner and not self._needs(job)
        if self._idle and self._working is not None:
            self._working.cancel()


def preparing(prepare: Step, metrics: FineTuningMetrics) -> RunnerSpec[TrainingJob]:
    """How this gateway checks the files of jobs."""
    return _work(states.needs_preparation, prepare, PREPARED_AT_ONCE, metrics.preparing, metrics)


def publishing(publish: Step, metrics: FineTuningMetrics) -> RunnerSpec[TrainingJob]:
    """How this gateway publishes what jobs have made."""
    return _work(states.needs_publication, publish, PUBLISHED_AT_ONCE, metrics.publishing, metrics)


def _work(
    needs: Callable[[TrainingJob], bool], step: Step, places: int, running: Gauge, metrics: FineTuningMetrics
) -> RunnerSpec[TrainingJob]:
    return RunnerSpec(
        needs,
        lambda job: time.time() >= job.look_at,
        places,
        lambda lease, _: TrainingRunner(lease, needs, step),
        running,
        metrics.taken_over,
    )
