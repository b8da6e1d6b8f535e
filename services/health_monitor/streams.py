"""How full the broker's streams are and how far back they reach, for Prometheus: asked every few seconds, so that a
scrape waits for nothing."""

import asyncio
import time
from datetime import datetime

import msgspec
import structlog

from services.health_monitor.metrics import HealthMetrics
from shared import subjects
from shared.broker_errors import BROKER_ERRORS, reason_of
from shared.bus import Bus

log = structlog.get_logger(__name__)

STREAMS = (subjects.INTAKE_STREAM, subjects.JOURNAL_STREAM)
INTERVAL = 2.0
"""Seconds between two questions: a dashboard that is read every 5 s shows what is true."""
ANSWER_WITHIN = 5.0


class StreamState(msgspec.Struct):
    """What is in a stream. nats-py leaves out the time of the first message."""

    messages: int
    bytes: int
    first_ts: datetime


class StreamLimits(msgspec.Struct):
    max_bytes: int = -1
    max_age: int = 0
    """Nanoseconds."""


class StreamInfo(msgspec.Struct):
    """The broker's answer, as far as it is of interest."""

    state: StreamState
    config: StreamLimits


_decoder = msgspec.json.Decoder(StreamInfo)


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
        gauges = (metrics.messages, metrics.bytes, metrics.max_bytes, metrics.age, metrics.max_age)
        try:
            answer = await self._bus.client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=ANSWER_WITHIN)
            info = _decoder.decode(answer.data)
        except (
            *BROKER_ERRORS,
            msgspec.DecodeError,
        ) as error:  # the latter: it answers that it has no such stream
            log.debug("stream_not_known", stream=stream, reason=reason_of(error))
            for gauge in gauges:
                gauge.remove(stream)
            return
        metrics.answers.observe(time.perf_counter() - began)
        for gauge, value in zip(gauges, figures(info, time.time()), strict=True):
            gauge.labels(stream).set(value)


def figures(info: StreamInfo, now: float) -> tuple[float, ...]:
    """Messages, bytes, bytes that there may be, age of the oldest message, age that it may have (seconds)."""
    state, config = info.state, info.config
    age = max(0.0, now - state.first_ts.timestamp()) if state.messages else 0.0
    return state.messages, state.bytes, max(0, config.max_bytes), age, config.max_age / 1e9
