"""A health monitor's Prometheus metrics. How full the broker's streams are and how far back they reach is asked every
few seconds (`StreamPoll`), so that a scrape waits for nothing.
"""

import asyncio
import time
from datetime import datetime
from functools import partial

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of
from shared.service.endpoints import begin_at_zero

log = structlog.get_logger(__name__)

_PREFIX = "ryzanstein_health"


class HealthMetrics:
    """One object per service, in the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=_PREFIX, registry=registry)
        gauge = partial(Gauge, namespace=_PREFIX, registry=registry)
        stream = partial(Gauge, labelnames=["stream"], namespace="ryzanstein_nats_stream", registry=registry)
        self.beats = counter("beats", "Heartbeats received.", ["service"])
        self.instances = gauge("instances", "Service instances by state.", ["service", "state"])
        self.groups = gauge("groups", "Executor groups by state.", ["state"])
        self.weight = gauge(
            "group_weight", "Speed of a group against its past and its peers; below 1: degraded.", ["group"]
        )
        self.group_state = gauge("group_state", "1 for each group's present state.", ["group", "model", "state"])
        self.group_lost = gauge(
            "group_lost",
            "1 for a group that is gone without having been drained, for as long as it is listed.",
            ["group", "model"],
        )
        self.events = counter("events", "Group events published.", ["kind"])
        self.writes = counter("writes", "Records written.")
        self.write_failures = counter("write_failures", "Writes of records that failed.")
        self.clock_ahead = gauge(
            "clock_ahead_seconds",
            "Seconds by which an instance's clock is ahead of the monitor's.",
            ["service_instance"],
        )
        self.messages = stream("messages", "Messages in a stream of the broker.")
        self.bytes = stream("bytes", "Bytes of a stream of the broker.")
        self.max_bytes = stream("max_bytes", "Largest size of a stream of the broker, in bytes; 0: unlimited.")
        self.age = stream("age_seconds", "Age of the oldest message in a stream of the broker; 0: it is empty.")
        self.max_age = stream(
            "max_age_seconds", "Seconds for which a stream of the broker keeps its messages; 0: unlimited."
        )
        self.answers = Histogram(
            "ryzanstein_nats_answer_seconds",
            "Round trip of a stream-info request to the broker.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
            registry=registry,
        )
        begin_at_zero(self.events, ("up", "draining", "down"))


STREAMS = (subjects.INTAKE_STREAM, subjects.JOURNAL_STREAM)
INTERVAL = 2.0  # seconds between two questions: a dashboard that is read every 5 s shows what is true
ANSWER_WITHIN = 5.0


class StreamState(msgspec.Struct):
    """What is in a stream. nats-py leaves out the time of the first message."""

    messages: int
    bytes: int
    first_ts: datetime


class StreamLimits(msgspec.Struct):
    max_bytes: int = -1
    max_age: int = 0  # nanoseconds


class StreamInfo(msgspec.Struct):
    """The broker's answer, as far as it is of interest."""

    state: StreamState
    config: StreamLimits


_decoder = msgspec.json.Decoder(StreamInfo)


class StreamPoll:
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
        metrics, began = self._metrics, time.perf_counter()
        gauges = (metrics.messages, metrics.bytes, metrics.max_bytes, metrics.age, metrics.max_age)
        try:
            answer = await self._bus.client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=ANSWER_WITHIN)
            info = _decoder.decode(answer.data)
        # The latter: it answers that it has no such stream.
        except (*BROKER_ERRORS, msgspec.DecodeError) as error:
            log.debug("stream_info_failed", stream=stream, reason=reason_of(error))
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
