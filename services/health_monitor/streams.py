"""How full the broker's streams are, for Prometheus: asked every few seconds, so that a scrape waits for nothing."""

import asyncio
import time

import structlog

from services.health_monitor.metrics import HealthMetrics
from shared import subjects
from shared.broker_errors import BROKER_ERRORS, reason_of
from shared.bus import Bus

log = structlog.get_logger(__name__)

STREAMS = (subjects.INTAKE_STREAM, subjects.JOURNAL_STREAM)
INTERVAL = 2.0
"""Seconds between two questions: a dashboard that is read every 5 s shows what is true."""


class StreamWatch:
    """Asks for ever. While the broker does not answer there are no figures, rather than old ones."""

    def __init__(self, bus: Bus, metrics: HealthMetrics) -> None:
        self._bus = bus
        self._metrics = metrics

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            for stream in STREAMS:
                await self.ask(stream)
            await asyncio.sleep(INTERVAL)

    async def ask(self, stream: str) -> None:
        """Asks once."""
        metrics, began = self._metrics, time.perf_counter()
        try:
            info = await self._bus.jetstream().stream_info(stream)
        except BROKER_ERRORS as error:
            log.debug("stream_not_known", stream=stream, reason=reason_of(error))
            for gauge in (metrics.messages, metrics.bytes):
                gauge.remove(stream)
            return
        metrics.answers.observe(time.perf_counter() - began)
        metrics.messages.labels(stream).set(info.state.messages)
        metrics.bytes.labels(stream).set(info.state.bytes)
