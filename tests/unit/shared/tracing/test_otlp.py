"""The recorder and a collector that is there, slow, or away."""

import threading
from collections.abc import Iterator

import pytest

from shared import tracing
from shared.tracing import _State
from tests.otlp import Collector, collector

REMOTE = tracing.TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "other=1")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield running
        running.answering.set()
        tracing.close()


def test_a_span_and_what_is_noted_of_it_arrive(received: Collector) -> None:
    assert tracing.configure("service", "instance", {"ryzanstein.group": "g"})
    with tracing.begin("edge", REMOTE, attributes={"n": 1}) as edge, tracing.active(edge):
        assert tracing.current() is tracing.edge() is edge
        with tracing.stage("inner") as inner:
            assert (tracing.current(), tracing.edge()) == (inner, edge)
        with pytest.raises(KeyError), tracing.stage("broken"):
            raise KeyError("what a client wrote")
    edge.end()
    tracing.close()
    assert not tracing.on()
    spans = {span.name: span for span in received.spans}
    assert set(spans) == {"edge", "inner", "broken"}
    assert {span.trace_id for span in received.spans} == {REMOTE.trace_id}
    assert spans["edge"].parent_id == REMOTE.span_id
    assert spans["inner"].parent_id == spans["broken"].parent_id == spans["edge"].span_id
    assert (spans["edge"].resource["ryzanstein.group"], spans["edge"].attributes["n"]) == ("g", 1)
    assert (spans["broken"].failed, spans["broken"].attributes) == (True, {"error.type": "KeyError"})
    assert spans["broken"].events == [], "messages of errors may quote what a client wrote"


@pytest.mark.parametrize(("sampler", "argument", "kept"), [("always_off", "", 0), ("traceidratio", "1.0", 1)])
def test_the_sampler_is_opentelemetrys(
    received: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, kept: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert tracing.configure("service", "instance")
    with tracing.begin("a") as span:
        tracing.under(span, "b").end()
    tracing.close()
    assert len(received.spans) == 2 * kept


def test_a_parents_decision_holds(received: Collector) -> None:
    assert tracing.configure("service", "instance")
    unsampled = REMOTE._replace(flags=0)
    assert tracing.begin("a", unsampled) is tracing.NONE
    assert tracing.follow(unsampled.traceparent, "", "b", kind="consumer") is tracing.NONE
    assert tracing.follow("", "", "c", kind="consumer") is tracing.NONE
    assert tracing.follow("nonsense", "", "d", kind="consumer") is tracing.NONE
    tracing.close()
    assert received.spans == []


def test_a_collector_that_does_not_answer_holds_nobody_up(received: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room is dropped and counted, and the end waits no longer than it may."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    received.answering.clear()
    assert tracing.configure("service", "instance")
    recorder = _State.recorder
    assert recorder is not None
    for _ in range(100):
        tracing.begin("a").end()
    assert recorder.statistics().dropped >= 100 - 3 * 8
    closing = threading.Thread(target=tracing.close, args=(0.2,), daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "OpenTelemetry itself would have waited for as long as the collector"
    assert recorder.statistics().exported == 0


def test_a_collector_that_is_away_loses_spans_and_nothing_else(
    received: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert tracing.configure("service", "instance")
    recorder = _State.recorder
    assert recorder is not None
    tracing.begin("a").end()
    tracing.close(0.2)
    assert recorder.statistics() == tracing.Statistics(0, 1, 0)
    tracing.begin("b").end()
