"""Brings LoRA adapters from the object store to this host's disk, and tells the batcher.

    request ── not on disk ──▶ fetch ──▶ check against the model ──▶ AdapterCache ──▶ batcher.adapter_ready
    KV `adapters` ── registered for the model ──▶ the same in the background, while there is room without deleting

Never within a step: a request is held meanwhile, as while its grammar is compiled. What cannot be had ends the
requests that need it, and no others.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from services.executor.leader.adapter_cache import AdapterCache
from shared.errors import InvalidRequest, ModelLoadError, RyzansteinError, StorageFull, reason_of
from shared.messages.registry import AdapterRecord, is_digest
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.objects import MissingObject
from shared.tasks import cancel_all

log = structlog.get_logger(__name__)

AT_ONCE = 4  # adapters that are fetched at a time for requests; one more in the background


class AdapterBatcher(Protocol):
    """What decides about requests that have adapters; of each method `Scheduler` says more."""

    def adapter_ready(self, digest: str, directory: str) -> None: ...

    def adapter_failed(self, digest: str, error: RyzansteinError) -> None: ...

    def adapter_gone(self, digest: str) -> None: ...

    @property
    def adapters_in_use(self) -> set[str]: ...

    @property
    def adapters(self) -> list[str]: ...


class Adapters:
    """Of one group. Called from the leader's event loop."""

    def __init__(
        self,
        model: str,
        cache: AdapterCache,
        batcher: AdapterBatcher,
        digest_of: Callable[[Path], str],
        wake: Callable[[], None],
    ) -> None:
        """`digest_of`: of the files in a directory; raises `ModelLoadError` where the model cannot be computed with
        them. In a thread of its own. `wake`: something has changed in the batcher."""
        self._model, self._cache, self._batcher = model, cache, batcher
        self._digest_of, self._wake = digest_of, wake
        self._files: AdapterFiles | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._checking = asyncio.Lock()
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, bus: Bus) -> None:
        """Adapters of the model are fetched from now on, those that are registered too."""
        self._files = AdapterFiles(bus)
        for work in (self._watch(bus), self._preload()):
            self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        await cancel_all([*self._tasks, *self._fetching.values()])
        self._cache.close()

    def want(self, digest: str) -> None:
        """A request with this adapter is about to be added."""
        if not is_digest(digest) or digest in self._fetching or digest in self._cache.in_use:
            return
        if not self._held(digest):
            task = asyncio.create_task(self._fetch_for_requests(digest))
            self._fetching[digest] = task
            task.add_done_callback(lambda _: self._fetching.pop(digest, None))

    def release_unused(self) -> None:
        """Files that nobody needs may be deleted by whoever needs room."""
        for digest in self._cache.in_use - self._batcher.adapters_in_use:
            self._batcher.adapter_gone(digest)
            self._cache.release(digest)

    def _held(self, digest: str) -> bool:
        try:
            directory = self._cache.hold(digest)
        except OSError as error:
            log.warning("adapter_cache_unreadable", adapter=digest, error=reason_of(error))
            return False
        if directory is not None:
            self._batcher.adapter_ready(digest, str(directory))
            self._wake()
        return directory is not None

    async def _fetch_for_requests(self, digest: str) -> None:
        try:
            async with self._slots:
                await self._fetch(digest)
            if not self._held(digest):
                raise StorageFull(f"The adapter {digest[:12]} was deleted again at once; raise --adapter-cache-bytes.")
        except RyzansteinError as error:
            log.warning("adapter_load_failed", adapter=digest, code=error.code, error=str(error))
            self._batcher.adapter_failed(digest, error)
            self._wake()

    async def _fetch(self, digest: str) -> None:
        """Puts an adapter on the disk where it is not there. Raises `RyzansteinError`, one sentence."""
        assert self._files is not None, "the bus is connected"
        if self._cache.has(digest):
            return
        try:
            part = await asyncio.to_thread(self._cache.begin, await self._files.size(digest))
            try:
                await self._files.fetch(digest, part)
                await self._check(digest, part)
                self._cache.add(digest, part)
            except BaseException:
                self._cache.drop(part)
                raise
        except MissingObject:
            raise InvalidRequest(
                f"The files of the adapter {digest[:12]} are not there any more; load the adapter again.", param="model"
            ) from None
        except OSError as error:
            raise StorageFull(f"The adapter {digest[:12]} cannot be kept on disk: {reason_of(error)}.") from error
        log.info("adapter_fetched", adapter=digest, model=self._model)

    async def _check(self, digest: str, part: Path) -> None:
        try:
            async with self._checking:
                found = await asyncio.to_thread(self._digest_of, part)
        except ModelLoadError as error:  # of the client's making: no other ring would take it
            raise InvalidRequest(str(error), param="model") from None
        if found != digest:
            raise InvalidRequest(
                f"The files of the adapter {digest[:12]} are not those it was registered with; load it again.",
                param="model",
            )

    # --- what is registered ----------------------------------------------------------------------

    async def _watch(self, bus: Bus) -> None:
        records = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
        async for update in records.watch():
            record = None if update is None else update[1]
            if record is not None and record.model == self._model and is_digest(record.digest):
                self._wanted.put_nowait(record.digest)

    async def _preload(self) -> None:
        """One after the other; what does not fit is fetched when a request comes."""
        assert self._files is not None, "the bus is connected"
        while True:
            digest = await self._wanted.get()
            if digest in self._fetching or self._cache.has(digest):
                continue
            try:
                if await self._files.size(digest) <= await asyncio.to_thread(self._cache.room):
                    await self._fetch(digest)
            except MissingObject:  # it has been removed since
                pass
            except RyzansteinError as error:
                log.warning("adapter_preload_failed", adapter=digest, code=error.code, error=str(error))
