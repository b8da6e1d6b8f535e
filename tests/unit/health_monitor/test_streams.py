"""How full the broker's streams are: what it says, and nothing while it says nothing."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import nats.errors
from prometheus_client import CollectorRegistry

from services.health_monitor.metrics import (
    STREAMS,
    HealthMetrics,
    StreamInfo,
    StreamLimits,
    StreamPoll,
    StreamState,
    figures,
)


class Broker:
    """Answers with so many messages, or not at all."""

    def __init__(self) -> None:
        self.messages = 3
        self.away = False

    @property
    def client(self) -> "Broker":
        return self

    async def request(self, subject: str, *, timeout: float) -> Any:
        if self.away:
            raise nats.errors.NoRespondersError
        state = {"messages": self.messages, "bytes": 100 * self.messages, "first_ts": "2026-11-21T10:00:00.123456789Z"}
        limits = {"max_bytes": 1000, "max_age": 60_000_000_000}
        return SimpleNamespace(data=msgspec.json.encode({"state": state, "config": limits}))


def shown(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["stream"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


async def test_old_figures_are_not_shown_while_the_broker_does_not_answer() -> None:
    registry, broker = CollectorRegistry(), Broker()
    watch = StreamPoll(broker, HealthMetrics(registry))  # type: ignore[arg-type]

    async def asked() -> tuple[dict[str, float], dict[str, float]]:
        for stream in STREAMS:
            await watch.ask(stream)
        return shown(registry, "ryzanstein_nats_stream_messages"), shown(registry, "ryzanstein_nats_stream_bytes")

    full = dict.fromkeys(STREAMS, 3), dict.fromkeys(STREAMS, 300)
    assert await asked() == full
    broker.away = True
    assert await asked() == ({}, {})
    assert await asked() == ({}, {}), "still away"
    broker.away = False
    assert await asked() == full
    assert shown(registry, "ryzanstein_nats_stream_max_age_seconds") == dict.fromkeys(STREAMS, 60)


def test_how_far_back_a_stream_reaches() -> None:
    first = datetime(2026, 11, 21, 10, tzinfo=UTC)
    full = StreamInfo(StreamState(3, 900, first), StreamLimits(1000, 3600 * 10**9))
    assert figures(full, first.timestamp() + 40) == (3, 900, 1000, 40, 3600)
    empty = StreamInfo(StreamState(0, 0, datetime(1, 1, 1, tzinfo=UTC)), StreamLimits())
    assert figures(empty, first.timestamp()) == (0, 0, 0, 0, 0)
