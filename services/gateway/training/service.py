"""Fine-tuning jobs as clients see them: created, looked at, listed, paused, resumed and cancelled; their events, their
checkpoints, and the files of what they have made."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from services.gateway.auth.authenticator import Principal
from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import InvalidParameter, QuotaExceeded, RouteError
from services.gateway.core.pagination import page
from services.gateway.files.files import Files
from services.gateway.jobs.leases import Jobs, fingerprint, job_id
from services.gateway.training import states
from services.gateway.training.objects import checkpoint_id, event_id, event_object, event_of, published_checkpoints
from services.gateway.training.requests import MAX_SEED, FineTuningCreate, hyperparameters_of, method_of
from services.gateway.training.storage import TrainingStorage
from shared import tracing
from shared.limits import EVENT_STREAMS
from shared.messages.batches import FileRecord
from shared.messages.registry import ModelSpec
from shared.messages.training import TrainedAdapter, TrainingEvent, TrainingJob
from shared.nats.adapters import CONFIG, WEIGHTS, AdapterFiles
from shared.nats.kv import KvEntry
from shared.nats.objects import MissingObject
from shared.nats.training import TrainingEvents
from shared.tasks import cancel_all

ItemT = TypeVar("ItemT")

PURPOSE = "fine-tune"  # of the files that jobs learn from
LOOK = 1.0  # seconds of silence after which a stream of events looks whether its job is over
AHEAD = 64  # events that a stream is told before its client has taken earlier ones
ADAPTER_FILES = (CONFIG, WEIGHTS)


class _Listed(NamedTuple, Generic[ItemT]):
    """As a page has it."""

    id: str
    created_at: float
    item: ItemT


def unknown_job(job: str) -> RouteError:
    """The error for an id of which there is no job, or another tenant's."""
    return RouteError(f"No fine-tuning job found with id '{job[:64]}'.")


class FineTuning:
    """Methods raise `InvalidRequest`, `BrokerUnavailable`."""

    def __init__(
        self,
        jobs: Jobs[TrainingJob],
        files: Files,
        events: TrainingEvents,
        catalog: Catalog,
        adapters: AdapterFiles,
        storage: TrainingStorage,
    ) -> None:
        self._jobs = jobs
        self._files = files
        self._events = events
        self._catalog = catalog
        self._adapters = adapters
        self._storage = storage
        self._followed: Counter[str] = Counter()  # streams of events, by tenant

    # --- its life --------------------------------------------------------------------------------

    async def create(self, wanted: FineTuningCreate, principal: Principal, key: str = "") -> TrainingJob:
        """A new job; under an idempotency key the one that there is."""
        hyperparameters, tenant = hyperparameters_of(wanted), principal.tenant
        print_, name = fingerprint(wanted) if key else "", job_id(states.ID, tenant, key)
        if key and (known := await self._jobs.find_by_key(name, tenant, print_)) is not None:
            return known
        base = self._base(wanted.model)
        training = await self._file(wanted.training_file, tenant, "training_file")
        validation = None
        if wanted.validation_file:
            validation = await self._file(wanted.validation_file, tenant, "validation_file")
        await self._jobs.admit(tenant)
        card = self._catalog.known_card(base.name)
        needed = self._storage.needed(card, hyperparameters)
        self._storage.check(tenant, needed)
        job = TrainingJob(
            id=name,
            tenant=tenant,
            model=base.name,
            method=method_of(wanted),
            training_file=training.id,
            training_object=training.object_name,
            created_at=time.time(),
            seed=secrets.randbelow(MAX_SEED) if wanted.seed is None else wanted.seed,
            hyperparameters=hyperparameters,
            validation_file=validation.id if validation else "",
            validation_object=validation.object_name if validation else "",
            suffix=wanted.suffix or "",
            metadata=wanted.metadata,
            key=principal.key,
            fingerprint=print_,
            traceparent=tracing.edge().traceparent,
            base=base,
            storage=needed,
        )
        if not await self._jobs.create(job):
            return await self._jobs.find_by_key(name, tenant, print_) or job
        self._storage.reserve(job)
        await self.say(job, "job_created", f"Created fine-tuning job: {job.id}")
        return job

    def _base(self, name: str) -> ModelSpec:
        resolved = self._catalog.resolve(name)
        if resolved.adapter:
            raise InvalidParameter(
                f"'{name[:128]}' is an adapter itself; train one on its base, '{resolved.model}'.", param="model"
            )
        card = self._catalog.known_card(resolved.model)
        if card is not None and (card.bidirectional or not card.does("generate")):
            raise InvalidParameter(
                f"The model '{resolved.model[:128]}' generates no text ({', '.join(card.tasks) or 'an encoder'}), and "
                "what is trained here does; name another base.",
                param="model",
                reason="model_not_trainable",
            )
        return self._catalog.registry.specs.get(resolved.model) or ModelSpec(resolved.model, "")

    async def _file(self, file_id: str, tenant: str, param: str) -> FileRecord:
        try:
            file = await self._files.get(file_id, tenant)
        except RouteError as error:
            raise RouteError(error.message, param=param) from None
        if file.purpose != PURPOSE:
            raise InvalidParameter(
                f"The file '{file.id}' has the purpose '{file.purpose}'; upload it with the purpose '{PURPOSE}'.",
                param=param,
            )
        return file

    async def get(self, job: str, tenant: str) -> TrainingJob:
        found = await self._jobs.get(job, tenant)
        if found is None:
            raise unknown_job(job)
        return found

    async def listed(
        self, tenant: str, after: str | None, limit: int, metadata: Mapping[str, str] | None
    ) -> tuple[list[TrainingJob], bool]:
        """The newest first, and whether there are more. `metadata`: those that have these; None: those without any."""
        jobs = [job for job in await self._jobs.of(tenant) if _matches(job, metadata)]
        return page(jobs, after=after, limit=limit)

    async def cancel(self, job: str, tenant: str) -> TrainingJob:
        """Its checkpoints stay."""
        return await self._change(job, tenant, lambda known: states.cancelled(known, time.time()), "cancel")

    async def pause(self, job: str, tenant: str) -> TrainingJob:
        """What it has done is kept, and goes on with `resume`."""
        return await self._change(job, tenant, states.paused, "pause")

    async def resume(self, job: str, tenant: str) -> TrainingJob:
        return await self._change(job, tenant, states.resumed, "resume")

    async def _change(
        self, job: str, tenant: str, change: Callable[[TrainingJob], TrainingJob], verb: str
    ) -> TrainingJob:
        before = await self.get(job, tenant)
        changed = await self._jobs.change(job, tenant, change)
        if changed is None:
            raise unknown_job(job)
        said = _SAID[verb]
        if changed.status != before.status:
            await self.say(changed, f"job_{changed.status}", said[1])
        elif changed.wanted != before.wanted:
            await self.say(changed, f"{verb}_asked", said[0])
        return changed

    # --- what it says ----------------------------------------------------------------------------

    async def say(self, job: TrainingJob, kind: str, message: str) -> None:
        """Writes one of its events."""
        await self._events.add(job.tenant, event_of(job, kind, message, time.time()), job.attempt)

    async def events(self, job: str, tenant: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """The newest first, and whether there are more."""
        known = await self.get(job, tenant)
        entries = [entry async for entry in self._events.of(tenant, job)]
        entries.sort(key=lambda entry: (entry.value.step, entry.value.created, entry.key))
        listed = [_Listed(event_id(entry.key), float(place), entry) for place, entry in enumerate(entries)]
        found, more = page(listed, after=after, limit=limit)
        return [event_object(one.item.key, one.item.value, known.steps) for one in found], more

    async def follow(
        self, job: str, tenant: str, after: int
    ) -> AsyncGenerator[tuple[int, dict[str, Any]] | None, None]:
        """Its events and their positions behind the position `after`, in the order of their writing, as they come; None
        after a second of silence. Ends with the job. Raises `QuotaExceeded`."""
        if self._followed[tenant] >= EVENT_STREAMS.value:
            raise QuotaExceeded(
                f"You follow {self._followed[tenant]:,} fine-tuning jobs at this gateway ({EVENT_STREAMS.cited()}); "
                "end one of the streams."
            )
        known, shown = await self.get(job, tenant), after
        self._followed[tenant] += 1
        told: asyncio.Queue[KvEntry[TrainingEvent] | None] = asyncio.Queue(AHEAD)
        watcher = asyncio.create_task(self._watch(job, tenant, told))
        try:
            while True:
                entry = await _next(told)
                if entry is None:
                    yield None
                    known = await self.get(job, tenant)
                    if known.clean and told.empty():
                        break
                elif entry.revision > shown:
                    shown = entry.revision
                    if not known.steps:
                        known = await self.get(job, tenant)
                    yield shown, event_object(entry.key, entry.value, known.steps)
            async for entry in self._events.of(tenant, job):  # what the watcher was not told yet
                if entry.revision > shown:
                    yield entry.revision, event_object(entry.key, entry.value, known.steps)
        finally:
            await cancel_all([watcher])
            self._followed[tenant] -= 1
            if not self._followed[tenant]:
                del self._followed[tenant]

    async def _watch(self, job: str, tenant: str, told: "asyncio.Queue[KvEntry[TrainingEvent] | None]") -> None:
        async with contextlib.aclosing(self._events.follow(tenant, job)) as entries:
            async for entry in entries:
                if entry is not None:
                    await told.put(entry)

    # --- what it has made ------------------------------------------------------------------------

    async def checkpoints(
        self, job: str, tenant: str, after: str | None, limit: int
    ) -> tuple[TrainingJob, list[TrainedAdapter], bool]:
        """The newest first."""
        known = await self.get(job, tenant)
        listed = [_Listed(checkpoint_id(known, one), float(one.step), one) for one in published_checkpoints(known)]
        found, more = page(listed, after=after, limit=limit)
        return known, [one.item for one in found], more

    async def adapter_file(
        self, job: str, tenant: str, file: str, step: int | None
    ) -> tuple[int, AsyncGenerator[bytes, None]]:
        """The size and the bytes of one of the two files of what it has made, as peft has them. `step`: of a
        checkpoint; None: of its result."""
        if file not in ADAPTER_FILES:
            raise RouteError(f"An adapter has no file '{file[:64]}'; its files are {' and '.join(ADAPTER_FILES)}.")
        known = await self.get(job, tenant)
        made = [*known.adapters, *([known.result] if known.result else [])]
        at = {one.step: one for one in made}
        wanted = known.result if step is None else at.get(step)
        if wanted is None:
            steps = ", ".join(str(one.step) for one in made) or "none yet"
            what = "no result yet" if step is None else f"no checkpoint at step {step:,}"
            raise RouteError(
                f"The fine-tuning job '{job}' has {what}; its checkpoints are at the steps: {steps}.",
                param="checkpoint" if step is not None else None,
            )
        try:
            return await self._adapters.file(wanted.digest, file)
        except MissingObject:
            raise RouteError(
                f"The files of the fine-tuning job '{job}' at step {wanted.step:,} were deleted with its model."
            ) from None


async def _next(told: "asyncio.Queue[KvEntry[TrainingEvent] | None]") -> KvEntry[TrainingEvent] | None:
    """None: nothing for a second."""
    try:
        return await asyncio.wait_for(told.get(), LOOK)
    except TimeoutError:
        return None


# By what its tenant asks for: where its host does it, and where it is done.
_SAID = {
    "cancel": ("Fine-tuning job is being cancelled", "Fine-tuning job cancelled"),
    "pause": ("Fine-tuning job is being paused", "Fine-tuning job paused"),
    "resume": ("Fine-tuning job goes on", "Fine-tuning job resumed, moving job to queued state"),
}


def _matches(job: TrainingJob, metadata: Mapping[str, str] | None) -> bool:
    if metadata is None:
        return not job.metadata
    return metadata.items() <= (job.metadata or {}).items()
