"""Histograms that cost little, and figures under others' names: both as prometheus_client has them."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.service.endpoints import (
    EXPOSITION_SECONDS,
    LATENCY,
    Alias,
    Aliases,
    Exposition,
    Health,
    QuickHistograms,
    StateCollector,
    new_registry,
)


def samples(metrics: list[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_the_text_is_made_once_a_second_however_often_it_is_asked_for() -> None:
    made, now = 0, 0.0
    registry = CollectorRegistry()

    class Counting(Collector):
        def collect(self) -> list[Metric]:
            nonlocal made
            made += 1
            return [GaugeMetricFamily("made", "x", made)]

    registry.register(Counting())
    made = 0  # registering collects too
    exposition = Exposition(registry, lambda: now)
    assert [b"made 1.0" in exposition.text() for _ in range(100)] == [True] * 100
    now = EXPOSITION_SECONDS
    assert b"made 2.0" in exposition.text()


@given(st.lists(st.one_of(st.sampled_from(LATENCY), st.floats(0, 200))))
def test_a_quick_histogram_says_what_prometheus_own_says(values: list[float]) -> None:
    theirs = Histogram("one_seconds", "x", ["model"], buckets=LATENCY, registry=None)
    ours = QuickHistograms("one_seconds", "x", ["model"], LATENCY, CollectorRegistry())
    for value in values:
        theirs.labels("m").observe(value)
        ours.labels("m").observe(value)
    theirs.labels("m")
    ours.labels("m")
    found, expected = samples(list(ours.collect())), samples(list(theirs.collect()))
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) < 1e-6 for key in found)


def test_an_alias_has_the_same_samples_under_the_other_name() -> None:
    registry = new_registry()
    counter = Counter("ours_tokens", "Tokens.", ["model", "reason"], registry=registry)
    histogram = QuickHistograms("ours_seconds", "Time.", ["model"], (1.0,), registry)
    counter.labels("m", "stop").inc(3)
    histogram.labels("m").observe(0.5)
    both = {"model": "model_name", "reason": "finished_reason"}
    aliases = Aliases(
        [
            Alias("vllm:tokens", counter, "ours_tokens", both),
            Alias("vllm:seconds", histogram, "ours_seconds", both),
            Alias("vllm:nothing", histogram, "not_there", both),
        ]
    )
    found = samples(list(aliases.collect()))
    assert found == {
        ("vllm:tokens_total", (("finished_reason", "stop"), ("model_name", "m"))): 3,
        ("vllm:seconds_bucket", (("le", "1.0"), ("model_name", "m"))): 1,
        ("vllm:seconds_bucket", (("le", "+Inf"), ("model_name", "m"))): 1,
        ("vllm:seconds_count", (("model_name", "m"),)): 1,
        ("vllm:seconds_sum", (("model_name", "m"),)): 0.5,
    }
    assert [metric.type for metric in aliases.collect()] == ["counter", "histogram"]


def test_readiness_and_connections_that_were_lost_are_told() -> None:
    health = Health("scheduler", "s-1", "ready", True)
    found = samples(list(StateCollector(lambda: health, lambda: False, lambda: 4).collect()))
    assert found == {
        ("ryzanstein_service_ready", ()): 1,
        ("ryzanstein_nats_connected", ()): 0,
        ("ryzanstein_nats_reconnects_total", ()): 4,
    }
