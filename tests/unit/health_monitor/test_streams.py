"""How full the broker's streams are: what it says, and nothing while it says nothing."""

from types import SimpleNamespace
from typing import Any

import nats.errors
from prometheus_client import CollectorRegistry

from services.health_monitor.metrics import HealthMetrics
from services.health_monitor.streams import STREAMS, StreamWatch


class Broker:
    """Answers with so many messages, or not at all."""

    def __init__(self) -> None:
        self.messages = 3
        self.away = False

    def jetstream(self) -> "Broker":
        return self

    async def stream_info(self, stream: str) -> Any:
        if self.away:
            raise nats.errors.NoRespondersError
        return SimpleNamespace(state=SimpleNamespace(messages=self.messages, bytes=100 * self.messages))


def shown(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["stream"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


async def test_old_figures_are_not_shown_while_the_broker_does_not_answer() -> None:
    registry, broker = CollectorRegistry(), Broker()
    watch = StreamWatch(broker, HealthMetrics(registry))  # type: ignore[arg-type]

    async def asked() -> tuple[dict[str, float], dict[str, float]]:
        for stream in STREAMS:
            await watch.ask(stream)
        return shown(registry, "ryzanstein_nats_stream_messages"), shown(
            registry, "ryzanstein_nats_stream_bytes"
        )

    full = dict.fromkeys(STREAMS, 3), dict.fromkeys(STREAMS, 300)
    assert await asked() == full
    broker.away = True
    assert await asked() == ({}, {})
    assert await asked() == ({}, {}), "still away"
    broker.away = False
    assert await asked() == full
