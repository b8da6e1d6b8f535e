"""How far back the journal reaches, as a real broker tells it."""

from prometheus_client import CollectorRegistry

from services.health_monitor.metrics import HealthMetrics, StreamPoll
from shared.messages import TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus


async def test_a_broker_tells_of_age_and_limits(bus: Bus) -> None:
    registry, journal = CollectorRegistry(), {"stream": subjects.JOURNAL_STREAM}
    watch = StreamPoll(bus, HealthMetrics(registry))
    await watch.ask("NONE")
    assert registry.get_sample_value("ryzanstein_nats_stream_age_seconds", {"stream": "NONE"}) is None
    await watch.ask(subjects.JOURNAL_STREAM)
    assert registry.get_sample_value("ryzanstein_nats_stream_age_seconds", journal) == 0
    assert registry.get_sample_value("ryzanstein_nats_stream_max_age_seconds", journal) == 3600
    assert registry.get_sample_value("ryzanstein_nats_stream_max_bytes", journal) == 1 << 30
    await bus.publish_durable(subjects.tokens("g"), TokenFrame("g", 1, 0, []))
    await watch.ask(subjects.JOURNAL_STREAM)
    age = registry.get_sample_value("ryzanstein_nats_stream_age_seconds", journal)
    assert age is not None
    assert 0 < age < 60
