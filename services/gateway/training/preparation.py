"""From the files of a fine-tuning job to the tokens that a host learns from.

    validating_files ──the base's card and tokenizer──▶ files read, checked, tokenized
                                                          ├─ faults ──▶ events ──▶ failed
                                                          └──▶ object `training` ──▶ what is `auto` chosen ──▶ queued

Nothing is kept on the way: whoever takes the job over does it again, and writes the same object.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
import structlog

from services.gateway.core.catalog import Catalog
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.errors import InvalidParameter, ModelLoadFailed, QuotaExceeded
from services.gateway.files.files import Files
from services.gateway.intake.fine_tuning.dataset import Dataset, chosen
from services.gateway.intake.fine_tuning.faults import CODE, Faults, sentence
from services.gateway.intake.validation import check_task
from services.gateway.jobs.leases import JobLease, Jobs
from services.gateway.tokenizer.store import TokenizerStore
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.training import states
from services.gateway.training.objects import event_of
from services.gateway.training.settings import FineTuningSettings
from services.gateway.training.storage import TrainingStorage
from services.gateway.training.tokenization import BaseModelTokenizer, TokenizedFile, TrainingFileReader
from shared.errors import (
    InternalError,
    ModelDoesNotFit,
    NoGroupAvailable,
    QueueFull,
    StorageFull,
    Unavailable,
    UnknownModel,
)
from shared.messages import ModelCard
from shared.messages.training import (
    Examples,
    TokenizedData,
    TrainingData,
    TrainingError,
    TrainingEvent,
    TrainingJob,
    steps_of,
)
from shared.nats.objects import CHUNK, MissingObject, Objects
from shared.nats.training import TrainingEvents
from shared.process import give_back

log = structlog.get_logger(__name__)

AT_ONCE = 2  # jobs whose examples are in memory here, one of each tenant; others wait for their turn
BASE_WITHIN = 86_400.0  # seconds from a job's beginning in which its base must have been loaded once
# Seconds after which it is told why it is not, and until it is waited for again.
TOLD_EVERY, BASE_PAUSE = 5.0, 1.0
NOT_TRAINABLE = "model_not_trainable"
# Seconds for which a full object store is tried again, and between two tries: each reads the files anew, since nothing
# is held meanwhile.
ROOM_WITHIN, ROOM_PAUSE = 3600.0, 120.0


class _Failed(Exception):
    """The job ends."""

    def __init__(self, error: TrainingError, faults: Faults | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.faults = faults


class Stores(NamedTuple):
    """Where things lie."""

    jobs: Jobs[TrainingJob]
    files: Files
    objects: Objects  # what jobs train with
    events: TrainingEvents
    storage: TrainingStorage


class FilePreparation:
    """One per gateway."""

    def __init__(
        self,
        stores: Stores,
        catalog: Catalog,
        cold_starts: ColdStarts,
        tokenizers: TokenizerStore,
        body_limit: int,
        settings: FineTuningSettings,
    ) -> None:
        self._jobs, self._files, self._objects, self._events, self._storage = stores
        self._catalog = catalog
        self._cold_starts = cold_starts
        self._tokenizers = tokenizers
        self._body_limit, self._settings = body_limit, settings
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, lease: JobLease[TrainingJob]) -> None:
        """Leaves the job queued or failed. Raises `LeaseLost`, and `RyzansteinError` where it is tried again."""
        job = lease.job
        try:
            base = await self._base(lease)
            if lease.job.waiting_for:
                await lease.write(partial(states.waiting, reason=""))
            for event in _begun(job):
                await self._events.add(job.tenant, event)
            async with self._tenants.setdefault(job.tenant, asyncio.Lock()), self._places:
                files = await self._tokenized(job, base)
                data = await asyncio.to_thread(_encoded, [file.data for file in files])
                await self._reserve(lease, base.card, files, len(data))
                await self._store(lease, data)
        except _Failed as failed:
            await self._fail(lease, failed)
            return
        finally:
            give_back()  # the examples
        await self._queue(lease, files, len(data))

    # --- the base --------------------------------------------------------------------------------

    async def _base(self, lease: JobLease[TrainingJob]) -> BaseModelTokenizer:
        try:
            card = await self._card(lease)
            check_task(card, "generate")
        except (UnknownModel, ModelLoadFailed, ModelDoesNotFit) as error:
            raise _Failed(TrainingError(error.code, error.message, "model")) from None
        except InvalidParameter as error:
            raise _Failed(TrainingError(NOT_TRAINABLE, error.message, "model")) from None
        if card.bidirectional:
            message = f"{card.model} is an encoder: it writes no text, so there are no answers that it could learn."
            raise _Failed(TrainingError(NOT_TRAINABLE, message, "model"))
        return BaseModelTokenizer(card, await self._tokenizer(lease, card))

    async def _tokenizer(self, lease: JobLease[TrainingJob], card: ModelCard) -> Tokenizer:
        """Raises `RyzansteinError` while it cannot be had: the job says why."""
        try:
            return await self._tokenizers.get(card, lease.job.tenant)
        except (Unavailable, InternalError) as error:
            if time.time() >= lease.job.created_at + BASE_WITHIN:
                raise _Failed(TrainingError(error.code, error.message, "model")) from None
            await lease.write(partial(states.waiting, reason=error.message))
            raise

    async def _card(self, lease: JobLease[TrainingJob]) -> ModelCard:
        """Of a base that was never loaded, once it is: a scheduler is asked for it, and the job says what it waits
        for."""
        job = lease.job
        model = self._catalog.resolve(job.model).model
        if (card := self._catalog.known_card(model)) is not None:
            return card
        give_up = job.created_at + BASE_WITHIN
        why = needed = f"The model '{model[:128]}' must be loaded once: its tokenizer is needed to check the files."
        with self._cold_starts.wanted(model):
            while True:
                if lease.job.waiting_for != why:
                    await lease.write(partial(states.waiting, reason=why))
                try:
                    until = min(time.time() + TOLD_EVERY, give_up)
                    return await self._cold_starts.card(job.model, size=lambda: 0, deadline=until)
                except (NoGroupAvailable, QueueFull) as error:
                    why = f"{needed} {error.message}"
                    if time.time() >= give_up:
                        raise _Failed(TrainingError(error.code, why, "model")) from None
                await asyncio.sleep(BASE_PAUSE)

    # --- the files -------------------------------------------------------------------------------

    async def _tokenized(self, job: TrainingJob, base: BaseModelTokenizer) -> list[TokenizedFile]:
        """The training file, and the one for validation where there is one."""
        files: list[TokenizedFile] = []
        for param, name in (("training_file", job.training_object), ("validation_file", job.validation_object)):
            if name:
                before = sum(file.data.tokens for file in files)
                files.append(await self._tokenized_file(job, base, param, name, before))
        return files

    async def _tokenized_file(
        self, job: TrainingJob, base: BaseModelTokenizer, param: str, name: str, before: int
    ) -> TokenizedFile:
        given = job.hyperparameters
        data = Dataset(job.method, base.card.context_length, given.max_tokens, truncate=given.truncate)
        file = TokenizedFile(data, Faults(param))
        reader = TrainingFileReader(self._files, self._body_limit, self._settings, base, job.method, file, before)
        try:
            await reader.read(name)
        except MissingObject:
            raise _Failed(
                TrainingError(
                    CODE,
                    f"The {param.replace('_', ' ')} was deleted, has expired or is damaged; upload it again and "
                    "create another job.",
                    param,
                )
            ) from None
        if file.faults.found:
            raise _Failed(file.faults.error(), file.faults)
        return file

    # --- what comes of it ------------------------------------------------------------------------

    async def _reserve(
        self, lease: JobLease[TrainingJob], card: ModelCard, files: Sequence[TokenizedFile], size: int
    ) -> None:
        """Room for all that it may come to, of its tenant's. Raises `_Failed`."""
        await self._jobs.wait()
        await self._catalog.adapters.wait()
        job, examples = lease.job, files[0].data.examples
        given = chosen(job.hyperparameters, job.method, examples)
        needed = self._storage.needed(card, given, steps_of(given, examples), size)
        try:
            self._storage.check(job.tenant, needed, but=job.id)
        except QuotaExceeded as error:
            raise _Failed(TrainingError(error.code, error.message)) from None
        self._storage.reserve(await lease.write(partial(states.reserved, storage=needed)))

    async def _store(self, lease: JobLease[TrainingJob], data: bytes) -> None:
        """Writes the examples, where nobody has yet. Raises `StorageFull`, and `_Failed` where it was full for long."""
        job = lease.job
        try:
            await self._objects.write(object_name(job), _parts(data), nuid=secrets.token_hex(11), fresh=True)
        except StorageFull as error:
            if job.blocked_since and time.time() >= job.blocked_since + ROOM_WITHIN:
                raise _Failed(TrainingError(error.code, error.message)) from None
            raise StorageFull(error.message, retry_after=ROOM_PAUSE) from None

    async def _queue(self, lease: JobLease[TrainingJob], files: Sequence[TokenizedFile], size: int) -> None:
        job = lease.job
        data = tokenized(job, [file.data for file in files], size)
        given = chosen(job.hyperparameters, job.method, data.examples)
        base = self._catalog.registry.specs.get(job.model) or job.base  # whose tokens they are
        for event in validation_events(job, files, data):
            await self._events.add(job.tenant, event)

        def change(job: TrainingJob) -> TrainingJob:
            queued = states.queued(job, data, given)
            return queued if queued is job else msgspec.structs.replace(queued, base=base)

        await lease.write(change)
        log.info("fine_tuning_files_checked", fine_tuning_job=job.id, examples=data.examples, tokens=data.tokens)

    async def _fail(self, lease: JobLease[TrainingJob], failed: _Failed) -> None:
        job, faults = lease.job, failed.faults
        for number, fault in enumerate(faults.found if faults is not None else [], 1):
            detail = {"file": failed.error.param, **msgspec.structs.asdict(fault)}
            event = event_of(job, "file_fault", sentence(fault), time.time(), level="error", data=detail)
            await self._events.add(job.tenant, event, number)
        event = event_of(job, "job_failed", failed.error.message, time.time(), level="error")
        await self._events.add(job.tenant, event)
        await lease.write(lambda job: states.failed(job, time.time(), failed.error))
        log.info(
            "fine_tuning_files_refused",
            fine_tuning_job=job.id,
            code=failed.error.code,
            faults=len(faults.found) if faults is not None else 0,
        )


def object_name(job: TrainingJob) -> str:
    """Where its examples lie, whoever writes them."""
    return f"{job.id}-examples"


def _encoded(files: Sequence[Dataset]) -> bytes:
    packed = [file.packed() for file in files]
    return msgspec.msgpack.encode(TrainingData(packed[0], packed[1] if len(packed) > 1 else Examples()))


async def _parts(data: bytes) -> AsyncGenerator[bytes, None]:
    for begin in range(0, len(data), CHUNK):
        yield data[begin : begin + CHUNK]


def tokenized(job: TrainingJob, files: Sequence[Dataset], size: int = 0) -> TokenizedData:
    """How much it is. `size`: bytes of the object."""
    training, validation = files[0], files[1] if len(files) > 1 else None
    return TokenizedData(
        object_name(job),
        examples=training.examples,
        tokens=training.tokens,
        trained=training.trained,
        longest=max(file.longest for file in files),
        validation_examples=validation.examples if validation is not None else 0,
        validation_tokens=validation.tokens if validation is not None else 0,
        bytes=size,
    )


# --- events --------------------------------------------------------------------------------------


def _begun(job: TrainingJob) -> list[TrainingEvent]:
    named = (("training file", job.training_file), ("validation file", job.validation_file))
    return [
        event_of(job, f"validating_{words.replace(' ', '_')}", f"Validating {words}: {name}", time.time())
        for words, name in named
        if name
    ]


def validation_events(job: TrainingJob, files: Sequence[TokenizedFile], counts: TokenizedData) -> list[TrainingEvent]:
    """What there is to say of files that are in order."""
    events = [event for file in files for event in _remarks(job, file)]
    message = (
        f"The training file has {counts.examples:,} examples with {counts.tokens:,} tokens, of which "
        f"{counts.trained:,} are trained; the longest has {counts.longest:,}."
    )
    if counts.validation_examples:
        message += f" The validation file has {counts.validation_examples:,} with {counts.validation_tokens:,} tokens."
    hidden = ("object_name", "bytes")
    data = {name: value for name, value in msgspec.structs.asdict(counts).items() if name not in hidden}
    events.append(event_of(job, "files_checked", message, time.time(), data=data))
    events.append(event_of(job, "job_queued", "Files validated, moving job to queued state.", time.time()))
    return events


def _remarks(job: TrainingJob, file: TokenizedFile) -> list[TrainingEvent]:
    """What is no fault, and may still not be what was meant."""
    data, param = file.data, file.faults.param
    words, found = param.replace("_", " "), []
    if data.repeated:
        found.append(("lines_repeated", f"{data.repeated:,} lines of the {words} are repeated."))
    if data.cut:
        found.append(("examples_cut", f"{data.cut:,} examples of the {words} were cut at their end."))
    if job.method == "supervised" and data.examples > data.lines:
        found.append(
            (
                "turns_apart",
                f"The {data.lines:,} lines of the {words} make {data.examples:,} examples: the model's chat template "
                "shows earlier answers in another way than the last one.",
            )
        )
    if data.unlike_prompt:
        found.append(
            (
                "unlike_prompt",
                f"Prompts of the model end with {data.unlike_prompt[:64]!r}, which its chat template does not show "
                f"before answers such as those of the {words}: it learns to begin them without.",
            )
        )
    return [event_of(job, f"{param}_{kind}", message, time.time(), level="warn") for kind, message in found]
