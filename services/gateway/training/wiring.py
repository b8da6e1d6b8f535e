"""What a gateway has for fine-tuning jobs: the service behind the API, and who looks after jobs."""

from collections.abc import Coroutine
from typing import Any

from services.gateway.jobs.runners import Runners, sweep
from services.gateway.jobs.runtime import JobResources
from services.gateway.training.preparation import FilePreparation, Stores
from services.gateway.training.publication import Publication
from services.gateway.training.runner import FineTuningMetrics, fine_tuning_jobs, preparing, publishing
from services.gateway.training.service import FineTuning
from services.gateway.training.settings import FineTuningSettings
from services.gateway.training.storage import TrainingStorage
from shared.config import section_of
from shared.nats.adapters import AdapterFiles
from shared.nats.training import TrainingEvents, training_objects


class TrainingRuntime:
    """As `JobRuntime`."""

    def __init__(self, given: JobResources) -> None:
        bus, files, catalog = given.bus, given.files, given.catalog
        settings = section_of(given.settings, FineTuningSettings)
        self._jobs = fine_tuning_jobs(bus, settings.tenant_training_jobs)
        self._events = TrainingEvents(bus)
        self._objects = training_objects(bus)
        self._files = AdapterFiles(bus)
        self._storage = TrainingStorage(given.adapters, settings)
        self.service = FineTuning(self._jobs, files, self._events, catalog, self._files, self._storage)
        metrics = FineTuningMetrics(given.registry)
        stores = Stores(self._jobs, files, self._objects, self._events, self._storage)
        preparation = FilePreparation(
            stores, catalog, given.cold_starts, given.tokenizers, given.settings.body_limit, settings
        )
        publication = Publication(given.adapters, files, self._events, self._objects)
        # Owners of their own: of one gateway, too, the check of a file has ended before anything is cleaned up.
        self._runners = (
            Runners(bus, self._jobs, preparing(preparation.prepare, metrics), f"{given.instance}/files"),
            Runners(bus, self._jobs, publishing(publication.publish, metrics), f"{given.instance}/results"),
        )

    async def start(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        await self._jobs.bucket.ensure()
        await self._events.ensure()
        await self._objects.open()
        await self._files.open()
        return [
            (self._jobs.follow(*(one.news for one in (self._storage, *self._runners))), "fine-tuning jobs"),
            (sweep(self._jobs), "fine-tuning jobs that are forgotten"),
            *((runners.run(), "runners of fine-tuning jobs") for runners in self._runners),
        ]

    async def stop(self) -> None:
        for runners in self._runners:
            await runners.stop()
