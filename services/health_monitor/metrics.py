"""A health monitor's Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.metrics import begin_at_zero

_PREFIX = "ryzanstein_health"


class HealthMetrics:
    """One object per service, in the service's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.beats = Counter(f"{_PREFIX}_beats", "Heartbeats received.", ["service"], registry=registry)
        self.instances = Gauge(
            f"{_PREFIX}_instances", "Service instances by state.", ["service", "state"], registry=registry
        )
        self.groups = Gauge(f"{_PREFIX}_groups", "Executor groups by state.", ["state"], registry=registry)
        self.weight = Gauge(
            f"{_PREFIX}_group_weight",
            "Speed of a group against its past and its peers; below 1: degraded.",
            ["group"],
            registry=registry,
        )
        self.group_state = Gauge(
            f"{_PREFIX}_group_state",
            "1 for each group's present state.",
            ["group", "model", "state"],
            registry=registry,
        )
        self.group_lost = Gauge(
            f"{_PREFIX}_group_lost",
            "1 for a group that is gone without having been drained, for as long as it is listed.",
            ["group", "model"],
            registry=registry,
        )
        self.events = Counter(f"{_PREFIX}_events", "Group events published.", ["kind"], registry=registry)
        self.writes = Counter(f"{_PREFIX}_writes", "Records written.", registry=registry)
        self.write_failures = Counter(
            f"{_PREFIX}_write_failures", "Records that the broker did not take.", registry=registry
        )
        self.clock_ahead = Gauge(
            f"{_PREFIX}_clock_ahead_seconds",
            "Seconds by which an instance's clock is ahead of the monitor's.",
            ["service_instance"],
            registry=registry,
        )
        self.messages = Gauge(
            "ryzanstein_nats_stream_messages",
            "Messages in a stream of the broker.",
            ["stream"],
            registry=registry,
        )
        self.bytes = Gauge(
            "ryzanstein_nats_stream_bytes", "Bytes of a stream of the broker.", ["stream"], registry=registry
        )
        self.max_bytes = Gauge(
            "ryzanstein_nats_stream_max_bytes",
            "Bytes that a stream of the broker may have; 0: any number.",
            ["stream"],
            registry=registry,
        )
        self.age = Gauge(
            "ryzanstein_nats_stream_age_seconds",
            "Age of the oldest message in a stream of the broker; 0: it is empty.",
            ["stream"],
            registry=registry,
        )
        self.max_age = Gauge(
            "ryzanstein_nats_stream_max_age_seconds",
            "Seconds that a stream of the broker should keep its messages; 0: for ever.",
            ["stream"],
            registry=registry,
        )
        self.answers = Histogram(
            "ryzanstein_nats_answer_seconds",
            "Time that the broker takes to say how full a stream is.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
            registry=registry,
        )
        begin_at_zero(self.events, ("up", "draining", "down"))
