"""Settles requests that no ring takes: tells the consumer on its token log, then acknowledges.

Endings of the same moment travel in one frame per consumer.
"""

import asyncio

import nats.errors
import structlog

from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.waiting import WaitingRequest
from shared import subjects
from shared.bus import Bus
from shared.errors import RyzansteinError
from shared.messages import TokenEntry, TokenFrame

log = structlog.get_logger(__name__)


class Endings:
    """Takes endings at any time; `run` publishes them in the background."""

    def __init__(self, bus: Bus, metrics: SchedulerMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._due: asyncio.Queue[tuple[WaitingRequest, TokenEntry | None]] = asyncio.Queue()

    def fail(self, item: WaitingRequest, code: str, message: str, *, retryable: bool) -> None:
        """Ends the generation with an error."""
        log.info("generation_ended", request_id=item.request_id, generation_id=item.generation_id, code=code)
        self._metrics.ended.labels(code).inc()
        entry = TokenEntry(
            item.generation_id,
            item.attempt,
            item.position,
            [],
            finish="error",
            error_code=code,
            error=message,
            retryable=retryable,
        )
        self._due.put_nowait((item, entry))

    def cancel(self, item: WaitingRequest) -> None:
        """Ends the generation as its client wished."""
        log.info("generation_cancelled", request_id=item.request_id, generation_id=item.generation_id)
        self._metrics.ended.labels("cancelled").inc()
        entry = TokenEntry(item.generation_id, item.attempt, item.position, [], finish="cancelled")
        self._due.put_nowait((item, entry))

    def settle(self, item: WaitingRequest) -> None:
        """Acknowledges the request without a word: a ring has it, or a newer attempt took its place."""
        self._due.put_nowait((item, None))

    async def run(self) -> None:
        """Publishes and acknowledges until it is cancelled."""
        while True:
            batch = [await self._due.get()]
            while not self._due.empty():
                batch.append(self._due.get_nowait())
            try:
                await self._publish(batch)
            except (RyzansteinError, nats.errors.Error) as error:
                # Unacknowledged, the requests are delivered again and settled then.
                log.warning("endings_not_published", error=str(error))
            for _ in batch:
                self._due.task_done()

    async def drained(self) -> None:
        """Waits until everything taken so far is settled."""
        await self._due.join()

    async def _publish(self, batch: list[tuple[WaitingRequest, TokenEntry | None]]) -> None:
        by_consumer: dict[str, list[TokenEntry]] = {}
        for item, entry in batch:
            if entry is not None:
                by_consumer.setdefault(item.consumer, []).append(entry)
        for consumer, entries in by_consumer.items():
            await self._bus.publish(subjects.tokens(consumer), TokenFrame("", 0, 0, entries))
        for item, _ in batch:
            await item.delivery.ack()
