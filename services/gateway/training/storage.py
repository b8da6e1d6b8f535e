"""What fine-tuning keeps of each tenant, against its quota: what unfinished jobs have reserved, and the models that
jobs have made, until their files are gone.

    a job is admitted ──▶ reserved in its record ──▶ its host stores no more than that ──▶ over and clean
                                                                    └── models: in the registry, until they are deleted

Two gateways that admit within a few milliseconds may let a little more in.
"""

from typing import NamedTuple

from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.errors import QuotaExceeded
from services.gateway.training.settings import FineTuningSettings
from shared.limits import TENANT_FINE_TUNED_MODELS, TENANT_TRAINING_BYTES
from shared.messages import ModelCard
from shared.messages.training import TRAINING_OVER, Hyperparameters, TrainingJob
from shared.nats.tenants import tenant_key
from shared.training_storage import NAMES, kept_bytes, reserved_bytes


class Kept(NamedTuple):
    """Of one tenant."""

    bytes: int
    models: int  # in the registry, or to come


class TrainingStorage:
    """One per gateway."""

    def __init__(self, adapters: AdapterRegistry, settings: FineTuningSettings) -> None:
        self._adapters = adapters
        self._most = settings.tenant_training_bytes
        self._most_models = settings.tenant_fine_tuned_models
        self._share = self._most // settings.tenant_training_jobs
        self._jobs: dict[str, TrainingJob] = {}  # by key: those that are not over, or not clean yet

    def news(self, key: str, job: TrainingJob | None, _revision: int = 0) -> None:
        """What `watch` of the jobs has yielded, or this gateway has written."""
        if job is None or job.clean:
            self._jobs.pop(key, None)
        else:
            self._jobs[key] = job

    def needed(
        self, card: ModelCard | None, hyperparameters: Hyperparameters, steps: int = 0, examples: int = 0
    ) -> int:
        """Bytes that a job needs. Where no card tells how wide its base is, an equal share for each job that its tenant
        may have."""
        if card is None or not card.adapter_widths:
            return self._share
        return reserved_bytes(card.adapter_widths, hyperparameters, steps, examples)

    def usage(self, tenant: str, but: str = "") -> Kept:
        """`but`: without the job of that id."""
        jobs = {job.id: job for job in self._jobs.values() if job.tenant == tenant}
        others = [job for job in jobs.values() if job.id != but]
        size = sum(kept_bytes(job) if job.status in TRAINING_OVER else job.storage for job in others)
        models = sum(len(job.adapters) + 1 if job.status in TRAINING_OVER else NAMES for job in others)
        for record in self._adapters.entries_of(tenant):
            if record.job not in jobs:  # else it is part of what the job has reserved
                size += record.bytes * (len(record.retired) + bool(record.digest))
                models += 1
        return Kept(size, models)

    def check(self, tenant: str, needed: int, but: str = "") -> None:
        """Whether a job that needs so many bytes has room. Raises `QuotaExceeded`."""
        kept = self.usage(tenant, but)
        if kept.bytes + needed > self._most:
            raise QuotaExceeded(
                f"Your fine-tuned models and unfinished fine-tuning jobs keep {kept.bytes:,} bytes, and this job needs "
                f"up to {needed:,} ({TENANT_TRAINING_BYTES.cited(self._most)}); delete models, wait until a job has "
                "ended, or choose a smaller rank or fewer target modules."
            )
        if kept.models + NAMES > self._most_models:
            raise QuotaExceeded(
                f"You have {kept.models:,} fine-tuned models, {NAMES} of each unfinished job counted, and this job "
                f"makes up to {NAMES} ({TENANT_FINE_TUNED_MODELS.cited(self._most_models)}); delete models, or wait "
                "until a job has ended."
            )

    def reserve(self, job: TrainingJob) -> None:
        """It is admitted, and counts before the watch has told so."""
        self.news(tenant_key(job.tenant, job.id), job)
