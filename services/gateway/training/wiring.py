"""What a gateway has for fine-tuning jobs, built without I/O: the service behind the API, and who looks after jobs."""

from collections.abc import Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.catalog import Catalog
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.jobs.runners import Runners, sweep, watch
from services.gateway.tokenizer.store import TokenizerStore
from services.gateway.training.preparation import FilePreparation, Stores
from services.gateway.training.publication import Publication
from services.gateway.training.runner import FineTuningMetrics, fine_tuning_jobs, preparing, publishing
from services.gateway.training.service import FineTuning
from services.gateway.training.storage import TrainingStorage
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from shared.nats.training import TrainingEvents, training_objects


class Training:
    """Opened by `start`."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        settings: GatewaySettings,
        registry: CollectorRegistry,
        files: Files,
        catalog: Catalog,
        cold_starts: ColdStarts,
        tokenizers: TokenizerStore,
        adapters: AdapterRegistry,
    ) -> None:
        self._jobs = fine_tuning_jobs(bus, settings.tenant_training_jobs)
        self._events = TrainingEvents(bus)
        self._objects = training_objects(bus)
        self._files = AdapterFiles(bus)
        self._storage = TrainingStorage(adapters, settings)
        self.service = FineTuning(self._jobs, files, self._events, catalog, self._files, self._storage)
        metrics = FineTuningMetrics(registry)
        stores = Stores(self._jobs, files, self._objects, self._events, self._storage)
        preparation = FilePreparation(stores, catalog, cold_starts, tokenizers, settings)
        publication = Publication(adapters, files, self._events, self._objects)
        # Owners of their own: of one gateway, too, the check of a file has ended before anything is cleaned up.
        self._runners = (
            Runners(bus, self._jobs, preparing(preparation, metrics), f"{instance}/files"),
            Runners(bus, self._jobs, publishing(publication.publish, metrics), f"{instance}/results"),
        )

    async def start(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        """What is to run from now on, and its name in logs. Raises `BrokerUnavailable`."""
        await self._jobs.bucket.ensure()
        await self._events.ensure()
        await self._objects.open()
        await self._files.open()
        return [
            (watch(self._jobs, self._storage, *self._runners), "fine-tuning jobs"),
            (sweep(self._jobs), "fine-tuning jobs that are forgotten"),
            *((runners.run(), "runners of fine-tuning jobs") for runners in self._runners),
        ]

    async def stop(self) -> None:
        """Leaves its jobs to other gateways."""
        for runners in self._runners:
            await runners.stop()
