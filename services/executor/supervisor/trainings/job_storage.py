"""Stores what a trainer has written, in order, as long as it takes: of several states that wait the newest.

    state ──▶ events of its steps ──▶ object ──▶ record ──▶ the older object goes
    adapter ─▶ its files by digest ──▶ record
    metrics ─▶ object

While the broker is away it waits; where there is no room it tries for a while.
"""

import asyncio
import contextlib
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from services.executor.ipc.trainer_pipe import AdapterWritten, Finished, StateWritten
from services.executor.supervisor.trainings import job_changes
from services.executor.supervisor.trainings.job_files import JobFiles
from services.executor.supervisor.trainings.job_record import LocalJobRecord, NotMine, patiently
from shared.errors import BrokerUnavailable, InvalidRequest, StorageFull
from shared.limits import TENANT_TRAINING_BYTES
from shared.messages.training import TrainedAdapter, TrainingJob
from shared.training_storage import kept_bytes

STORE_PAUSE = 5.0  # seconds before the object store is tried again when it is full
STORE_PATIENCE = 900.0  # seconds after which a job fails for which there is no room

log = structlog.get_logger(__name__)

Written = StateWritten | AdapterWritten | Finished


class OverReserved(InvalidRequest):
    """It would keep more than it has reserved of its tenant's quota."""

    code = "quota_exceeded"


class JobStorage:
    def __init__(
        self, record: LocalJobRecord, files: JobFiles, directory: Path, tell: Callable[[], Awaitable[None]]
    ) -> None:
        """`directory`: where the trainer writes; `tell` publishes the events that are not published yet, and returns
        once the broker has stored them: who goes on from a state says nothing of the steps before it. It raises
        `BrokerUnavailable`."""
        self._record = record
        self._files = files
        self._directory = directory
        self._tell = tell
        self._waiting: deque[Written] = deque()
        self._come = asyncio.Event()
        self._closed = False
        self._old: set[str] = set()  # objects of states that the record names no more
        self._old_adapters: dict[int, TrainedAdapter] = {}  # the same, by step
        self._full_since = 0.0
        # Whether the training is to end: what has no room now is left, and it goes on later from its last state.
        self.hurries = False
        self.full = ""  # why nothing can be stored, where that is so
        self.result: TrainedAdapter | None = None
        self.finished: Finished | None = None
        self.metrics_object = ""

    def add(self, written: Written) -> None:
        """It is stored after what came before."""
        self._waiting.append(written)
        self._come.set()

    def close(self) -> None:
        """Nothing comes after that."""
        self._closed = True
        self._come.set()

    async def run(self) -> None:
        """Until all is stored. Raises `NotMine`, `OverReserved`, `OSError`, and `StorageFull` where there was no room
        for too long."""
        while True:
            while self._waiting:
                await self._next(self._waiting.popleft())
            if self._closed:
                return
            self._come.clear()
            await self._come.wait()

    async def discard(self) -> None:
        """What was stored for a result that is void now; where the broker is away it goes with the job."""
        if self.metrics_object:
            with contextlib.suppress(BrokerUnavailable):
                await self._files.remove(self.metrics_object)

    async def _next(self, written: Written) -> None:
        match written:
            case StateWritten():
                if not any(isinstance(later, StateWritten) for later in self._waiting):
                    await self._stored(lambda: self._store_state(written))
                (self._directory / written.file).unlink(missing_ok=True)
            case AdapterWritten():
                await self._stored(lambda: self._store_adapter(written))
                await asyncio.to_thread(shutil.rmtree, self._directory / written.directory, ignore_errors=True)
            case Finished():
                await self._stored(lambda: self._store_metrics(written))

    async def _stored(self, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await patiently(store)
            except StorageFull as error:
                now = time.monotonic()
                self._full_since = self._full_since or now
                self.full = f"What it has learned cannot be stored: {error.message}"
                if self.hurries:
                    return
                if now - self._full_since >= STORE_PATIENCE:
                    raise
                log.warning("training_store_full", job=self._record.job.id, error=error.message)
                await asyncio.sleep(STORE_PAUSE)
            else:
                self.full, self._full_since = "", 0.0
                return

    async def _store_state(self, written: StateWritten) -> None:
        before = self._record.job.state
        self._check(written.bytes)
        await self._tell()
        state = await self._files.put_state(written)
        try:
            await self._record.write(lambda job: job_changes.state_written(job, state))
        except NotMine:
            await self._files.remove(state.object_name)  # nobody else knows of it
            raise
        if before is not None and before.object_name != state.object_name:
            self._old.add(before.object_name)
        for name in list(self._old):  # again, where the broker was away the last time
            await self._files.remove(name)
            self._old.discard(name)

    async def _store_adapter(self, written: AdapterWritten) -> None:
        self._check(written.bytes)
        await self._files.put_adapter(written)
        adapter = TrainedAdapter(
            written.step, written.digest, written.rank, written.bytes, int(time.time()), written.metrics
        )
        if written.is_result:
            self.result = adapter
            return
        gone: list[TrainedAdapter] = []

        def change(job: TrainingJob) -> TrainingJob:
            nonlocal gone
            changed, gone = job_changes.adapter_written(job, adapter)
            return changed

        await self._record.write(change)
        self._old_adapters.update((old.step, old) for old in gone)
        for old in list(self._old_adapters.values()):
            await self._files.remove_adapter(old)
            self._old_adapters.pop(old.step, None)

    def _check(self, size: int) -> None:
        """Before anything is stored beside what the record names. Raises `OverReserved`."""
        job = self._record.job
        kept = kept_bytes(job)
        if job.storage and kept + size > job.storage:
            named = f"limit {TENANT_TRAINING_BYTES.name}, {TENANT_TRAINING_BYTES.setting} changes it"
            raise OverReserved(
                f"The job keeps {kept:,} bytes and would store {size:,} more, and it has reserved {job.storage:,} "
                f"({named}); create it with a smaller rank or fewer target modules."
            )

    async def _store_metrics(self, written: Finished) -> None:
        self.metrics_object = await self._files.put_metrics(written.metrics)
        self.finished = written
