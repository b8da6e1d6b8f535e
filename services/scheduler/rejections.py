"""Settles requests that no ring takes: tells the consumer on its token log, then acknowledges.

Rejections of the same moment travel in one frame per consumer. Requests that a ring has taken are acknowledged every
few milliseconds, many with one write, and at once where the last were some time ago: until then the broker keeps them,
as it does while they are dispatched.
"""

import asyncio

import structlog

from services.scheduler.metrics import SchedulerMetrics, code_label
from services.scheduler.request import WaitingRequest
from shared.errors import BrokerUnavailable
from shared.messages import TokenEntry, TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of

ACK_WAIT = 0.005  # seconds between two bursts of acknowledgements, at least
RETRY_PAUSE = 0.5  # seconds before what the broker has not taken is tried again
FRAME_ENTRIES = 512  # rejections per frame, at most: a frame must stay below the broker's limit

# A request to settle, with what its consumer has to be told first.
Due = tuple[WaitingRequest, TokenEntry | None]

log = structlog.get_logger(__name__)


class Rejections:
    """Takes rejections at any time; `run` publishes them in the background."""

    def __init__(self, bus: Bus, metrics: SchedulerMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._due: asyncio.Queue[list[Due]] = asyncio.Queue()
        self._taken: list[Due] = []  # requests to be acknowledged together
        self._burst = float("-inf")  # when the last were given out to be acknowledged; of the loop's clock

    def fail(self, item: WaitingRequest, code: str, message: str, *, retryable: bool) -> None:
        """Ends the generation with an error."""
        log.info("generation_ended", **item.log_fields, code=code)
        item.trace.ended(code)
        self._metrics.ended.labels(code_label(code)).inc()
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
        self._due.put_nowait([(item, entry)])

    def cancel(self, item: WaitingRequest) -> None:
        """Ends the generation as its client wished."""
        log.info("generation_cancelled", **item.log_fields)
        item.trace.ended("cancelled")
        self._metrics.ended.labels("cancelled").inc()
        entry = TokenEntry(item.generation_id, item.attempt, item.position, [], finish="cancelled")
        self._due.put_nowait([(item, entry)])

    def settle(self, item: WaitingRequest) -> None:
        """Acknowledges the request without a word: a ring has it, or a newer attempt took its place."""
        item.trace.ended("settled")
        self._taken.append((item, None))
        if len(self._taken) == 1:
            loop = asyncio.get_running_loop()
            wait = self._burst + ACK_WAIT - loop.time()
            if wait > 0:
                loop.call_later(wait, self._acknowledge_taken)
            else:  # behind the others of the same reply
                loop.call_soon(self._acknowledge_taken)

    def _acknowledge_taken(self) -> None:
        if self._taken:
            self._burst = asyncio.get_running_loop().time()
            self._due.put_nowait(self._taken)
            self._taken = []

    async def run(self) -> None:
        """Publishes and acknowledges until it is cancelled."""
        while True:
            batch, lists = await self._due.get(), 1
            while not self._due.empty():
                batch += self._due.get_nowait()
                lists += 1
            left = await self._settle(batch)
            if left:
                self._due.put_nowait(left)
            for _ in range(lists):
                self._due.task_done()
            if left:
                log.warning("rejections_pending", requests=len(left))
                await asyncio.sleep(RETRY_PAUSE)

    async def drained(self) -> None:
        """Waits until everything taken so far is settled."""
        self._acknowledge_taken()
        await self._due.join()

    async def _settle(self, batch: list[Due]) -> list[Due]:
        """Publishes and acknowledges; returns what the broker has not taken. Nothing stops the rest."""
        by_consumer: dict[str, list[tuple[WaitingRequest, TokenEntry]]] = {}
        told = []
        for item, entry in batch:
            if entry is None:
                told.append(item)
            else:
                by_consumer.setdefault(item.consumer, []).append((item, entry))
        left: list[Due] = []
        for consumer, dues in by_consumer.items():
            for start in range(0, len(dues), FRAME_ENTRIES):
                part = dues[start : start + FRAME_ENTRIES]
                if await self._tell(consumer, [entry for _, entry in part]):
                    told += [item for item, _ in part]
                else:
                    left += part
        left += [(item, None) for item in told if not await self._acknowledge(item)]
        return left

    async def _tell(self, consumer: str, entries: list[TokenEntry]) -> bool:
        """False when it must be tried again."""
        try:
            await self._bus.publish(subjects.tokens(consumer), TokenFrame("", 0, 0, entries))
        except BrokerUnavailable:
            return False
        except Exception:  # a consumer that cannot be told must not keep its requests for ever
            log.exception("rejection_publish_failed", consumer=consumer, requests=len(entries))
        return True

    async def _acknowledge(self, item: WaitingRequest) -> bool:
        """False when it must be tried again."""
        try:
            await item.delivery.ack()
        except BROKER_ERRORS as error:
            log.debug("ack_failed", **item.log_fields, error=reason_of(error))
            return False
        return True
