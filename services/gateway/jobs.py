"""Files and batches as a part of the gateway: what is opened, what runs beside it, what stops with it."""

from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from services.gateway.auth.authenticator import Authenticator
from services.gateway.backend import Backend
from services.gateway.batches.endpoints import line_endpoints
from services.gateway.batches.jobs import Jobs
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.parts import BatchParts
from services.gateway.batches.queue import BatchQueue
from services.gateway.batches.results import Results
from services.gateway.batches.runners import Runners
from services.gateway.batches.service import Batches
from services.gateway.catalog import Catalog
from services.gateway.files.store import Files
from services.gateway.requests.intake import Intake
from services.gateway.settings import GatewaySettings
from shared.nats.bus import Bus

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class FilesAndBatches:
    """Opened by `start`, once requests are taken."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        settings: GatewaySettings,
        registry: CollectorRegistry,
        intake: Intake,
        catalog: Catalog,
        authenticator: Authenticator,
    ) -> None:
        self._bus = bus
        self._files = Files(bus, settings)
        self._jobs = Jobs(bus, settings.tenant_batches)
        self._results = Results(bus, self._files.objects, settings.batch_window_limit)
        endpoints = line_endpoints(intake, catalog)
        self._batches = Batches(self._jobs, self._files, endpoints, settings)
        parts = BatchParts(
            self._files,
            self._results,
            endpoints,
            catalog,
            BatchMetrics(registry),
            settings,
            authenticator,
            instance,
        )
        self._runners = Runners(bus, self._jobs, parts)

    async def start(self, backend: Backend, spawn: Spawn) -> None:
        """Raises `BrokerUnavailable`, `ConfigurationError`."""
        await self._files.start()
        await self._jobs.start()
        await self._results.start()
        backend.open_jobs(self._files, self._batches)
        await BatchQueue(self._bus, self._batches, self._files).start()
        spawn(self._files.watch(), "files of tenants")
        spawn(self._files.run(), "files")
        spawn(self._runners.watch(), "batches")
        spawn(self._runners.run(), "batch runners")
        spawn(self._runners.sweep(), "batches that are forgotten")

    async def stop(self) -> None:
        """Leaves its batches to other gateways, what is done of them stored."""
        await self._runners.stop()
        await self._results.stop()
