"""What a gateway has for batches: the service behind the API, the queue of other programs, and who runs them."""

from collections.abc import Coroutine
from typing import Any

from services.gateway.batches.dependencies import BatchMetrics, BatchParts, line_endpoints
from services.gateway.batches.queue import BatchQueue
from services.gateway.batches.results import Results
from services.gateway.batches.runner import batch_work
from services.gateway.batches.service import Batches, batch_jobs
from services.gateway.batches.settings import BatchJobSettings
from services.gateway.jobs.runners import Runners, sweep
from services.gateway.jobs.runtime import JobResources
from shared.config import section_of


class BatchRuntime:
    """As `JobRuntime`."""

    def __init__(self, given: JobResources) -> None:
        files, settings = given.files, section_of(given.settings, BatchJobSettings)
        self._jobs = batch_jobs(given.bus, settings.tenant_batches)
        self._results = Results(given.bus, files.objects, settings.batch_window_limit)
        self.service = Batches(self._jobs, files, settings)
        self._queue = BatchQueue(given.bus, self.service, files)
        parts = BatchParts(
            files,
            self._results,
            line_endpoints(given.intake, given.catalog),
            given.catalog,
            given.cold_starts,
            BatchMetrics(given.registry),
            given.settings,
            settings,
            given.authenticator,
        )
        self._runners = Runners(given.bus, self._jobs, batch_work(parts), given.instance)

    async def start(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        await self._jobs.bucket.ensure()
        await self._results.start()
        await self._queue.start()
        return [
            (self._jobs.follow(self._runners.news), "batches"),
            (self._runners.run(), "batch runners"),
            (sweep(self._jobs), "batches that are forgotten"),
        ]

    async def stop(self) -> None:
        await self._runners.stop()  # what is done of its batches is stored
        await self._results.stop()
