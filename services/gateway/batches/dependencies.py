"""What every runner of a batch works with: the endpoints that lines may ask for, by their URL, and the metrics.

A new endpoint needs an entry in `LineUrl`, and nothing else of the batches.
"""

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.gateway.auth.authenticator import Authenticator
from services.gateway.batches.results import Results
from services.gateway.batches.service import LineUrl
from services.gateway.batches.settings import BatchJobSettings
from services.gateway.core.catalog import Catalog
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.errors import unsupported
from services.gateway.core.metrics import PREFIX
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.intake.intake import Intake
from services.gateway.intake.record import Context
from shared.service.endpoints import begin_at_zero


class LineEndpoint:
    """One endpoint, for lines of batches."""

    def __init__(self, endpoint: str, intake: Intake, catalog: Catalog) -> None:
        self._endpoint = endpoint
        self._intake = intake
        self._catalog = catalog

    def check(self, body: msgspec.Raw, tenant: str) -> str:
        """The model of `body`, a line of that tenant. Raises `InvalidRequest` for what is wrong with it."""
        request = self._intake.check(self._endpoint, body)
        for name in ("stream", "background"):  # it is left alone already
            if getattr(request, name, None):
                raise unsupported(name, where="in a batch")
        return self._catalog.resolve(request.model, tenant).model

    async def run(self, body: msgspec.Raw, context: Context, unwanted: Callable[[], bool]) -> bytes:
        """The whole response, JSON. `context` has a key under which a repeat, here or at another gateway, gets
        what the first call began. `unwanted` says, where the call is cancelled, whether that is the end of the
        line or another gateway goes on with it. Raises `RyzansteinError`."""
        run = await self._intake.prepare(self._endpoint, body, context)
        try:
            await run.begin(record_first=True)
            return await run.collect()
        except asyncio.CancelledError:
            if unwanted():
                run.cancel()
            raise
        finally:
            run.close()


def line_endpoints(intake: Intake, catalog: Catalog) -> dict[str, LineEndpoint]:
    """What works off the lines of each URL: the endpoint whose name is the URL with dots."""
    names = {url: url.removeprefix("/v1/").replace("/", ".") for url in get_args(LineUrl)}
    return {url: LineEndpoint(name, intake, catalog) for url, name in names.items() if intake.serves(name)}


class BatchMetrics:
    """Registered on the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        named: dict[str, Any] = {"namespace": PREFIX, "registry": registry}
        self.running = Gauge("batches_running", "Batches that this gateway runs.", **named)
        self.lines = Counter("batch_lines", "Batch lines that have ended.", ["result"], **named)
        self.retries = Counter("batch_line_retries", "Batch lines that were retried.", **named)
        self.in_flight = Gauge("batch_lines_in_flight", "Batch lines in flight.", **named)
        self.taken_over = Counter("batches_taken_over", "Batches taken over from lost gateways.", **named)
        begin_at_zero(self.lines, ("completed", "failed"))


class BatchParts(msgspec.Struct, frozen=True):
    """One set per gateway."""

    files: Files
    results: Results
    endpoints: dict[str, LineEndpoint]
    catalog: Catalog
    cold_starts: ColdStarts
    metrics: BatchMetrics
    settings: GatewaySettings
    own: BatchJobSettings
    authenticator: Authenticator
