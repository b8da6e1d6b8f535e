"""Gives fine-tuning jobs to hosts: the asyncio shell around `placement`.

KV training_jobs ──▶ TrainingPlacer ── holder of the lease ──┬─ host, attempt + 1 ──▶ KV training_jobs
hosts, groups ─────────────┘                                 └─ StartTraining, StopTraining ──▶ hosts.<instance>.control
"""

import time
from collections.abc import Callable

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Gauge

from services.scheduler.models.cluster import ClusterView
from services.scheduler.training.placement import TrainingPlacer
from shared.errors import RyzansteinError
from shared.messages import HostCommand, HostReply
from shared.messages.registry import StartTraining
from shared.messages.training import TRAINING_OVER, TrainingJob
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.tenants import tenant_key
from shared.nats.training import training_jobs
from shared.tasks import TaskSet

COMMAND_TIMEOUT = 5.0  # seconds that a host has to answer

log = structlog.get_logger(__name__)


def job_count(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "ryzanstein_training_jobs",
        "Fine-tuning jobs whose files are checked and that are not over, by whether a host has them; reported by the "
        "scheduler that decides.",
        ["state"],
        registry=registry,
    )


class TrainingJobs:
    """As `HostedJobs`."""

    def __init__(
        self, bus: Bus, cluster: ClusterView, registry: CollectorRegistry, changed: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._count = job_count(registry)
        self._changed = changed
        self._bucket = training_jobs(bus)
        self._placer = TrainingPlacer(cluster)
        self._jobs: dict[str, TrainingJob] = {}  # those that are not over, by their keys
        self._revisions: dict[str, int] = {}
        self._writing: set[str] = set()
        self._tasks = TaskSet("training_decision_failed")
        self.is_read = False

    @property
    def any(self) -> bool:
        return bool(self._jobs)

    async def start(self, spawn: Callable[..., object]) -> None:
        await self._bucket.ensure()
        spawn(self._bucket.follow_revisions(self._on_job, self._on_all), "training jobs")

    async def stop(self) -> None:
        await self._tasks.cancel()

    def step(self) -> None:
        """Jobs whose change is still being written wait for the next step."""
        decisions = self._placer.decide(self._jobs, time.time())
        for key, job in decisions.changes.items():
            if key not in self._writing:
                self._writing.add(key)
                self._tasks.spawn(self._write(key, job), key)
        for host, command in decisions.commands:
            self._tasks.spawn(self._tell(host, command), host)
        self._show(decisions.waiting, decisions.running)

    def rest(self) -> None:
        self._show(0, 0)

    def _show(self, waiting: int, running: int) -> None:
        self._count.labels("waiting").set(waiting)
        self._count.labels("running").set(running)

    def _on_all(self) -> None:
        self.is_read = True
        self._changed()

    def _on_job(self, key: str, job: TrainingJob | None, revision: int) -> None:
        self._note(key, job, revision)
        self._changed()

    def _note(self, key: str, job: TrainingJob | None, revision: int) -> None:
        if job is None or job.status in TRAINING_OVER:
            self._jobs.pop(key, None)
            self._revisions.pop(key, None)
        elif revision >= self._revisions.get(key, 0):
            self._jobs[key], self._revisions[key] = job, revision

    async def _write(self, key: str, job: TrainingJob) -> None:
        try:
            written = await self._bucket.update(key, job, self._revisions[key])
            if written is None:
                return  # it is another by now, as the watcher will tell
            self._note(key, job, written)
            if job.host:
                log.info("training_assigned", job=job.id, tenant=job.tenant, host=job.host, attempt=job.attempt)
        except (RyzansteinError, KeyError) as error:  # KeyError: it is over meanwhile
            log.warning("training_write_failed", job=job.id, error=str(error))
        finally:
            self._writing.discard(key)
            self._changed()

    async def _tell(self, host: str, command: HostCommand) -> None:
        try:
            reply = await self._bus.request(subjects.host_control(host), command, HostReply, timeout=COMMAND_TIMEOUT)
        except (RyzansteinError, msgspec.DecodeError) as error:  # it is told again
            log.debug("host_command_send_failed", host=host, error=str(error))
            return
        if not reply.ok and isinstance(command, StartTraining):
            log.warning("training_refused", host=host, job=command.job, error=reply.error)
            key = tenant_key(command.tenant, command.job)
            self._placer.refused(key, host, reply.memory, reply.error)
            self._changed()
