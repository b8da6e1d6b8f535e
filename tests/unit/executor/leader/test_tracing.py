"""Spans of attempts that are replaced, preempted or fail, and what is remembered of requests."""

import dataclasses
from typing import Any

import pytest

from services.executor.core.step_plan import StepPlan
from services.executor.leader import tracing
from services.executor.leader.tracing import Attempts
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.steps import ScheduledTokens
from shared.messages import GenerationRequest, TokenEntry
from tests.unit.executor.scheduler.stepped_ring import ask

PLAN = StepPlan(1, 0, b"", b"", b"", b"", b"", b"", b"")


@dataclasses.dataclass
class Noted:
    """A span, as far as the leader uses one."""

    name: str
    events: list[str] = dataclasses.field(default_factory=list)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    failed: str = ""
    ended: bool = False

    def set(self, attributes: dict[str, Any]) -> None:
        self.attributes |= attributes

    def event(self, name: str, attributes: object = None, *, at: int = 0) -> None:
        self.events.append(name)

    def fail(self, reason: str) -> None:
        self.failed = reason

    def end(self, *, at: int = 0) -> None:
        self.ended = True


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    made: list[Noted] = []

    def under(parent: Noted, name: str, **more: Any) -> Noted:
        made.append(Noted(name))
        return made[-1]

    monkeypatch.setattr(tracing.tracing, "follow", lambda parent, state, name, **more: under(Noted(""), name))
    monkeypatch.setattr(tracing.tracing, "under", under)
    monkeypatch.setattr(tracing.tracing, "ids_of", lambda span: {"trace_id": span.name})
    return made


def traced(name: str, attempt: int = 1) -> GenerationRequest:
    return ask(name, 5, attempt=attempt, traceparent="00-1-1-01")


def test_a_later_attempt_replaces_the_one_before(spans: list[Noted]) -> None:
    traces = Attempts("g", 1, list)
    traces.on_accepted(traced("a", 2), None, repeated=False)
    traces.on_accepted(traced("a", 1), None, repeated=False)
    assert [span.name for span in spans] == ["generate g", "queue"], "an earlier attempt begins nothing"
    traces.on_accepted(traced("a", 3), None, repeated=False)
    assert (spans[0].failed, spans[0].ended, spans[1].ended) == ("replaced", True, True)
    traces.ended(TokenEntry("a", 2, 0, [], finish="stop"))
    assert traces.traced, "what the earlier attempt still says ends nothing"
    traces.ended(TokenEntry("a", 3, 0, [], finish="error", error_code="ring_lost"))
    assert not traces.traced
    assert (spans[2].failed, spans[2].ended) == ("ring_lost", True)


def test_a_preemption_is_an_event_and_what_is_computed_again_is_counted(spans: list[Noted]) -> None:
    traces, request = Attempts("g", 1, list), traced("a")
    traces.on_accepted(request, None, repeated=False)
    sequence = Sequence(request, 0, 16, b"")
    prefill, again = ScheduledTokens(sequence, 5, samples=True), ScheduledTokens(sequence, 3, samples=False)
    for chunk in (prefill, again, again):
        traces.begin_step(PLAN, [chunk])
        traces.end_step(0.5)
        sequence.preempted = True
    traces.ended(TokenEntry("a", 1, 0, [7], finish="stop"))
    decode = next(span for span in spans if span.name == "decode")
    assert decode.events == ["preempted"]
    assert decode.attributes["ryzanstein.recomputed_tokens"] == 6


def test_the_ids_of_so_many_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "REMEMBERED", 2)
    attempts = Attempts("g", 1, list)
    for name in "abc":
        attempts.on_accepted(ask(name), None, repeated=False)
    assert list(attempts._request_ids) == ["b", "c"]
