"""Batches and fine-tuning jobs: exactly one result for each line, and for each job."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import ClassVar

from shared.messages.batches import OVER as BATCH_OVER
from shared.messages.training import TRAINING_OVER
from tests.simulation.clients.history import BatchSeen, JobSeen
from tests.simulation.promises.evidence import Evidence
from tests.simulation.promises.promise import Finding, Promise


class OneResultPerLine(Promise):
    name: ClassVar[str] = "one_result_per_line"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for batch in evidence.history.batches:
            if batch.ended >= 0:
                for told in self._batch(batch):
                    yield f"Batch {batch.identity} of {batch.client} ({batch.status}) {told}.", batch.identity

    def _batch(self, batch: BatchSeen) -> Iterator[str]:
        wanted = batch.status in batch.ends or (batch.status == "cancelled" and batch.cancel_asked)
        if not wanted:
            yield f"ended so, though nobody wanted it: {' → '.join(batch.statuses)}"
        if over := [state for state in batch.statuses[:-1] if state in BATCH_OVER]:
            yield f"was {over[0]} before"
        lines = Counter(str(one["custom_id"]) for one in [*batch.output, *batch.errors])
        if strange := sorted(lines.keys() - batch.wanted.keys()):
            yield f"has a result of {strange[0]}, which is no line of it"
        if twice := sorted(name for name, count in lines.items() if count > 1):
            yield f"has {lines[twice[0]]} results of {twice[0]}"
        if batch.status == "completed" and (lost := sorted(batch.wanted.keys() - lines.keys())):
            yield f"has no result of {lost[0]}, and of {len(lost)} lines in all"
        if batch.status == "completed" and batch.errors and not batch.fatal:
            yield f"has an error for {batch.errors[0]['custom_id']}: {batch.errors[0]['error']}"
        if batch.counts.get("completed") != len(batch.output):
            yield f"counts {batch.counts.get('completed')} completed lines and has {len(batch.output)}"
        yield from self._texts(batch)

    def _texts(self, batch: BatchSeen) -> Iterator[str]:
        for one in batch.output:
            text = one["response"]["body"]["choices"][0]["text"]
            wanted = batch.wanted.get(str(one["custom_id"]), text)
            if text != wanted:
                yield f"has {text[:20]!r} for {one['custom_id']}, where {wanted[:20]!r} was to come"
                return


class LinesComputedOnce(Promise):
    """By what the broker was given: each line is one generation, whoever ran the batch."""

    name: ClassVar[str] = "lines_computed_once"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        known = {batch.identity for batch in evidence.history.batches}
        identities: dict[str, set[str]] = defaultdict(set)
        for _, record in evidence.store.records():
            first = record.requests[0] if record.requests else record.outline
            if first is not None and any(name in first.request_id for name in known):
                identities[first.request_id].add(record.identity)
        for line, several in identities.items():
            if len(several) > 1:
                yield f"Line {line} was {len(several)} generations: {', '.join(sorted(several))}.", line


class OneResultPerJob(Promise):
    """Whatever a training met, it has one adapter: that of the undisturbed job."""

    name: ClassVar[str] = "one_result_per_job"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        same: dict[tuple[int, int], JobSeen] = {}
        for job in evidence.history.jobs:
            if job.ended < 0:
                continue
            for told in self._job(job):
                yield f"Job {job.identity} of {job.client} ({job.status}) {told}.", job.identity
            if job.status == "succeeded" and job.digest:
                first = same.setdefault((job.seed, job.examples), job)
                wanted = job.wanted_digest or first.digest
                if job.digest != wanted:
                    told = f"has the adapter {job.digest[:12]}, and the same job undisturbed {wanted[:12]}"
                    yield f"Job {job.identity} {told}.", job.identity

    def _job(self, job: JobSeen) -> Iterator[str]:
        if job.status == "failed" or (job.status == "cancelled" and not job.cancel_asked):
            yield f"ended so, though nobody wanted it: {' → '.join(job.statuses)}; {job.events[-1:]}"
        if over := [state for state in job.statuses[:-1] if state in TRAINING_OVER]:
            yield f"was {over[0]} before"
        if job.status != "succeeded":
            return
        if not job.model or len(job.names_of_adapters) != 1:
            yield f"has {len(job.names_of_adapters)} adapters called {job.model!r}"
        if len(job.results) != 1:
            yield f"has {len(job.results)} result files"
        if sorted(set(job.steps)) != list(range(1, max(job.steps, default=0) + 1)):
            yield f"has told of the steps {job.steps}"
        if twice := [step for step, count in Counter(job.steps).items() if count > 1]:
            yield f"has told of step {twice[0]} {job.steps.count(twice[0])} times"
