"""Owners: one for each generation, one scheduler that decides, one holder of each lease."""

from collections.abc import Iterator
from typing import ClassVar

from services.gateway.jobs.leases import LEASE
from shared.messages import ModelLease
from shared.messages.batches import BatchJob
from shared.messages.records import Ownership
from shared.messages.training import TrainingJob
from shared.nats import subjects
from tests.simulation.promises.evidence import Evidence
from tests.simulation.promises.promise import Finding, Promise

# Virtual seconds for which two that reach the broker may believe to own the same: news have to arrive.
TOGETHER = 15.0
EARLY = 0.01  # seconds by which a lease may be taken before its time: bytes travel


class OneOwner(Promise):
    name: ClassVar[str] = "one_owner"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for held in evidence.holdings.all():
            if held.until - held.since > TOGETHER and not evidence.during(held.since, held.until, TOGETHER):
                told = f"{' and '.join(held.who)} both had {held.what} from {held.since:.1f} to {held.until:.1f} s."
                yield told, held.what
        yield from self._claims(evidence)

    def _claims(self, evidence: Evidence) -> Iterator[Finding]:
        """A generation's chain of gateways only grows: nobody takes from one who was never its owner."""
        known: dict[str, Ownership] = {}
        entries = evidence.store.entries(subjects.GENERATIONS_BUCKET, Ownership)
        for at, identity, ownership in entries:
            before = known.get(identity)
            if ownership is None:
                known.pop(identity, None)
                continue
            if before is not None and before.owner not in ownership.consumers:
                told = f"{ownership.owner} took {identity} at {at:.3f} s without the log of {before.owner}."
                yield told, identity
            known[identity] = ownership


class OneLeaseHolder(Promise):
    """A lease goes to another when its holder has let go of it, or has been silent for its length."""

    name: ClassVar[str] = "one_lease_holder"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        length = float(evidence.settings.get("model_lease", 0.0))
        if length:
            yield from self._models(evidence, length)
        yield from self._jobs(evidence, subjects.BATCHES_BUCKET, BatchJob)
        yield from self._jobs(evidence, subjects.TRAINING_BUCKET, TrainingJob)

    def _models(self, evidence: Evidence, length: float) -> Iterator[Finding]:
        before: tuple[float, ModelLease] | None = None
        for at, _, lease in evidence.store.entries(subjects.LEASES_BUCKET, ModelLease):
            if lease is not None and before is not None and lease.holder != before[1].holder:
                yield from _early("the models", before[1].holder, lease.holder, at - before[0], length, at)
            before = None if lease is None else (at, lease)

    def _jobs(self, evidence: Evidence, bucket: str, kind: type[BatchJob] | type[TrainingJob]) -> Iterator[Finding]:
        """The lease of a job stands still when its beat does: others may write the job too."""
        known: dict[str, tuple[float, BatchJob | TrainingJob]] = {}
        for at, key, job in evidence.store.entries(bucket, kind):
            if job is None:
                known.pop(key, None)
                continue
            since, before = known.get(key, (at, job))
            if before.owner and job.owner and before.owner != job.owner:
                yield from _early(job.id, before.owner, job.owner, at - since, LEASE, at)
            moved = (before.owner, before.beat) != (job.owner, job.beat)
            known[key] = (at if moved else since, job)


def _early(what: str, before: str, after: str, silent: float, length: float, at: float) -> Iterator[Finding]:
    if silent < length - EARLY:
        told = (
            f"{after} took the lease of {what} at {at:.3f} s, {silent:.3f} s after {before} had written it; it holds "
            f"{length:g} s."
        )
        yield told, what
