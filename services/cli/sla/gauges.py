"""Prometheus' series to the figures of a report. Pure.

Outages of a model, each sample speaking for the step before it:

    no gateway       no gateway was scraped successfully
    no ready group   the health monitor knew of no ready or busy group, or the model had had one and had none
    failing          requests ended, `failing.IN_A_ROW` or more failed, and none succeeded
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.cli.sla.failing import FailingRuns
from services.cli.sla.intervals import Interval, clipped, common, merged
from services.cli.sla.latencies import Percentiles, bucket_percentiles
from services.cli.sla.report import Reason, Requests, Scope, Tokens, scope_of
from services.cli.sla.series import Samples, Series, growth, increases, spans, total

CLIENT_GONE = "499"
"""The gateway's status for a request that its client gave up."""
ROUNDING = 0.002
"""Seconds by which a sample's moment may differ from the one that was asked for: Prometheus has milliseconds."""
Causes = list[tuple[Reason, Interval]]


class Counters(NamedTuple):
    """Series of counters and histograms, with a label `model` where they have one."""

    requests: list[Series]
    first_token: list[Series]
    between_tokens: list[Series]
    end_to_end: list[Series]
    prompt: list[Series]
    cached: list[Series]
    output: list[Series]
    step: float
    """Seconds between two samples."""


class Gauges(NamedTuple):
    """Series of what held when, sampled more finely."""

    scraped: list[Series]
    """Something was scraped at all: what the source covers."""
    gateways: list[Series]
    """Gateways that answered their scrape."""
    ready: list[Series]
    """Ready groups, of whatever model."""
    ready_of: list[Series]
    """By model: above 0 while one of its groups is up."""
    step: float


def covered_of(gauges: Gauges, period: Interval) -> list[Interval]:
    """When the source had data: Prometheus was up, and had not forgotten it."""
    return clipped(spans(total(gauges.scraped), gauges.step), period)


class Evidence:
    """Puts the scopes together."""

    def __init__(self, counters: Counters, gauges: Gauges, period: Interval) -> None:
        self._counters = counters
        self._gauges = gauges
        self.covered = covered_of(gauges, period)
        first = self.covered[0].begin if self.covered else period.begin
        self._known_since = ROUNDING + (period.begin if first <= period.begin else first + counters.step)

    def scopes(self) -> list[Scope]:
        """All models together, then each."""
        models = sorted(
            {
                series.labels["model"]
                for some in (self._counters.requests, self._counters.output, self._gauges.ready_of)
                for series in some
                if series.labels.get("model")
            }
        )
        shared = self._down_for_all()
        causes: Causes = [*shared, *self._failing("")]
        single = []
        for model in models:
            own: Causes = [*shared, *self._failing(model), *self._not_ready(model)]
            causes += own
            single.append(self._scope(model, own, model))
        return [self._scope("", causes, None), *single]

    def _scope(self, model: str, causes: Causes, only: str | None) -> Scope:
        """`only`: the model whose series count; None: all."""
        counters = self._counters
        return scope_of(
            model,
            self._requests(only),
            causes,
            self.covered,
            first_token=self._percentiles(counters.first_token, only),
            between_tokens=self._percentiles(counters.between_tokens, only),
            end_to_end=self._percentiles(counters.end_to_end, only),
            tokens=Tokens(
                *(self._sum(some, only) for some in (counters.prompt, counters.cached, counters.output))
            ),
        )

    # --- counters --------------------------------------------------------------------------------

    def _requests(self, only: str | None) -> Requests:
        ends = {"completed": 0.0, "failed": 0.0, "refused": 0.0, "cancelled": 0.0}
        for series in _of(self._counters.requests, only):
            ends[_end(series.labels.get("status", ""))] += growth(series, self._known_since)
        return Requests(**{end: round(count) for end, count in ends.items()})

    def _sum(self, some: Sequence[Series], only: str | None) -> int:
        return round(sum(growth(series, self._known_since) for series in _of(some, only)))

    def _percentiles(self, some: Sequence[Series], only: str | None) -> Percentiles:
        counts: dict[float, float] = {}
        for series in _of(some, only):
            bound = float(series.labels.get("le", "nan"))
            if not math.isnan(bound):
                counts[bound] = counts.get(bound, 0.0) + growth(series, self._known_since)
        return bucket_percentiles(counts)

    # --- outages ---------------------------------------------------------------------------------

    def _failing(self, model: str) -> Iterator[tuple[Reason, Interval]]:
        """Of the requests of one model; empty: of those that failed before their model was known."""
        step, runs = self._counters.step, FailingRuns()
        good: dict[float, float] = {}
        bad: dict[float, float] = {}
        for series in _of(self._counters.requests, model):
            into = {"completed": good, "failed": bad}.get(_end(series.labels.get("status", "")))
            if into is not None:
                for at, amount in increases(series.samples, self._known_since):
                    into[at] = into.get(at, 0.0) + amount
        for at in sorted({*good, *bad}):
            if good.get(at):
                runs.good(at - step)
            elif bad.get(at):
                runs.bad(at - step, round(bad[at]))
        until = self.covered[-1].end if self.covered else 0.0
        for one in runs.outages(until):
            yield "failing", one

    def _down_for_all(self) -> Causes:
        step = self._gauges.step
        no_gateway = _absences(total(self._gauges.gateways), step)
        no_group = _absences(total(self._gauges.ready), step)
        return [*(("no gateway", one) for one in no_gateway), *(("no ready group", one) for one in no_group)]

    def _not_ready(self, model: str) -> Causes:
        """From when it was ready first: before, nobody had loaded it."""
        up = spans(total(_of(self._gauges.ready_of, model)), self._gauges.step)
        if not up:
            return []
        after = [Interval(up[0].begin, max(one.end for one in self.covered))] if self.covered else []
        missing = _without(common(after, self.covered), up)
        return [("no ready group", one) for one in missing if one.seconds >= self._gauges.step]


def _end(status: str) -> str:
    if status == CLIENT_GONE:
        return "cancelled"
    return {"4": "refused", "5": "failed"}.get(status[:1], "completed")


def _of(some: Iterable[Series], only: str | None) -> list[Series]:
    return [series for series in some if only is None or series.labels.get("model", "") == only]


def _absences(samples: Samples, step: float) -> list[Interval]:
    """When a number that was known was 0."""
    return spans([(at, float(value <= 0)) for at, value in samples], step)


def _without(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of `some` lies outside `others`."""
    left = list(some)
    for other in others:
        left = [
            part
            for one in left
            for part in (
                Interval(one.begin, min(one.end, other.begin)),
                Interval(max(one.begin, other.end), one.end),
            )
            if part.end > part.begin
        ]
    return merged(left)


def lacks(gauges: Gauges, scopes: Sequence[Scope]) -> list[str]:
    """What the series that are there leave open."""
    notes = []
    if not gauges.gateways:
        notes.append(
            "No job scrapes the gateways under the name that was looked for (--gateway-job): gateways that were gone "
            "are no outage here."
        )
    if not gauges.ready:
        notes.append("There are no metrics of the health monitor: outages are seen by failed requests alone.")
    if not gauges.ready_of:
        notes.append("The executors' metrics name no model: which model had no ready group is not known.")
    if len(scopes) > 1:
        notes.append("Prometheus has end-to-end times of all models together, not of each.")
    return notes
