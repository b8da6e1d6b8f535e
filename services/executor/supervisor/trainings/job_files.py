"""Files of a job between a trainer's directory and the object stores.

object store `training` ── examples, state ──▶ directory ──▶ trainer
object store `training` ◀── state, metrics ── directory
object store `adapters` ◀── adapter
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path

import structlog

from services.executor.ipc.trainer_pipe import EXAMPLES, STATE, AdapterWritten, StateWritten
from shared.errors import InternalError
from shared.messages.training import TrainedAdapter, TrainingJob, TrainingState
from shared.nats.adapters import AdapterFiles, job_holder
from shared.nats.bus import Bus
from shared.nats.objects import CHUNK, MissingObject
from shared.nats.training import clear_objects, object_name, training_objects, writing_of

PATIENCE = 30.0  # seconds for which an object is read on while the broker is away

log = structlog.get_logger(__name__)


class JobFiles:
    """Of one attempt. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, job: str, attempt: int, directory: Path) -> None:
        self._objects = training_objects(bus)
        self._adapters = AdapterFiles(bus)
        self._job = job
        self._attempt = attempt
        self._directory = directory
        self._writings = 0

    async def fetch_examples(self, job: TrainingJob) -> None:
        """Raises `InternalError` where they are gone."""
        assert job.data is not None, "it was queued with them"
        try:
            await self._fetch(job.data.object_name, EXAMPLES)
        except MissingObject:
            raise InternalError("The job's examples are gone from the object store; create the job again.") from None

    async def fetch_state(self, job: TrainingJob) -> bool:
        """What an earlier attempt has written, if the record names it; False: there is none, or it is lost."""
        if job.state is None:
            return False
        path = self._directory / STATE
        try:
            await self._fetch(job.state.object_name, STATE)
            if await asyncio.to_thread(_digest_of, path) == job.state.digest:
                return True
            reason = "it is not what was written"
        except (MissingObject, InternalError) as error:
            reason = str(error) or "it is gone"
        path.unlink(missing_ok=True)
        log.error("training_state_lost", job=job.id, step=job.state.step, reason=reason)
        return False

    async def put_state(self, written: StateWritten) -> TrainingState:
        """Raises `StorageFull`, `OSError`."""
        name = await self._put(self._directory / written.file, f"state-{written.step}")
        return TrainingState(written.step, name, written.bytes, written.digest)

    async def put_metrics(self, file: str) -> str:
        """The name of the object. Raises `StorageFull`, `OSError`."""
        return await self._put(self._directory / file, "metrics.csv")

    async def put_adapter(self, written: AdapterWritten) -> None:
        """Raises `StorageFull`, `OSError`."""
        await self._adapters.open()
        holder = job_holder(self._job, written.step)
        await self._adapters.put(written.digest, self._directory / written.directory, holder)

    async def remove(self, name: str) -> None:
        await self._objects.delete(name)

    async def remove_adapter(self, adapter: TrainedAdapter) -> None:
        """Unless a name has it, or another job."""
        await self._adapters.open()
        await self._adapters.release(adapter.digest, job_holder(self._job, adapter.step))

    async def clear_earlier(self, job: TrainingJob) -> None:
        """What earlier attempts have left that the record does not name."""
        keep = [job.data.object_name] if job.data is not None else []
        keep += [job.state.object_name] if job.state is not None else []
        gone = await clear_objects(self._objects, self._job, keep, before=self._attempt)
        if gone:
            log.info("training_leftovers_removed", job=self._job, objects=gone)

    async def open(self) -> None:
        """Creates the store where it does not exist."""
        await self._objects.open()

    async def _fetch(self, name: str, file: str) -> None:
        with await asyncio.to_thread((self._directory / file).open, "wb") as target:
            async for part in self._objects.read(name, patience=PATIENCE):
                await asyncio.to_thread(target.write, part)

    async def _put(self, path: Path, name: str) -> str:
        self._writings += 1
        stored = object_name(self._job, self._attempt, name)
        nuid = writing_of(self._job, self._attempt, f"{name.partition('.')[0]}-{self._writings}")
        await self._objects.write(stored, _parts_of(path), nuid=nuid)
        return stored


async def _parts_of(path: Path) -> AsyncGenerator[bytes, None]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while part := await asyncio.to_thread(file.read, 8 * CHUNK):
            yield part


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
