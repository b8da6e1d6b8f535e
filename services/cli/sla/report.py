"""What a report says, whether its targets are met, and how it is shown: a table, Markdown, or JSON, whose shape
(`ryzanstein sla --format json`) scripts rely on.

Shares are between 0 and 1, times in seconds, moments in unix seconds; null: not known, or there was nothing. Of
latencies, a `Quantile` says between which bounds the exact value lies:

    journal      each value falls into a bucket that is 1% wide: known within 1%, whatever the number of values
    Prometheus   counts of a few wide buckets: known within its bucket, interpolated as histogram_quantile does
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import tzinfo
from typing import Any, Literal, NamedTuple

import msgspec
from rich.console import Console

from services.cli.sla.periods import Interval, length_of, merged, repairs, shown
from services.cli.ui import print_columns, say

GROWTH = 1.01
"""Upper over lower bound of a bucket."""
SMALLEST = 1e-6
"""Seconds; what is shorter counts as this."""
PERCENTILES = (50, 95, 99)

_LOG = math.log(GROWTH)


class Quantile(msgspec.Struct, frozen=True):
    """A percentile of latencies, in seconds."""

    value: float
    at_least: float
    """The exact one is not less."""
    at_most: float | None
    """Nor more; None: it was longer than the source tells."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of so many values; without values there are none."""

    count: int
    p50: Quantile | None = None
    p95: Quantile | None = None
    p99: Quantile | None = None


class Latencies:
    """Values in buckets of 1% each: the memory that it takes does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self.buckets: dict[int, int] = {}
        """How many values are at most GROWTH to the power of the key, and more than to that of the one before."""

    def add(self, seconds: float) -> None:
        self.count += 1
        bucket = math.ceil(math.log(max(seconds, SMALLEST)) / _LOG)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: "Latencies") -> None:
        self.count += other.count
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def quantile(self, percent: float) -> Quantile | None:
        """The nearest rank: the smallest value that `percent` of all values do not exceed."""
        rank, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                low, high = GROWTH ** (bucket - 1), GROWTH**bucket
                return Quantile((low + high) / 2, low, high)
        return None

    def percentiles(self) -> Percentiles:
        return Percentiles(self.count, *map(self.quantile, PERCENTILES))


def bucket_quantile(counts: Mapping[float, float], percent: float) -> Quantile | None:
    """From how many values were at most as long as each bound (cumulative; one bound is infinity).

    As Prometheus' `histogram_quantile`: linear within the bucket, the last finite bound for what lies behind it.
    """
    bounds = sorted(counts)
    if not bounds or not math.isinf(bounds[-1]) or counts[bounds[-1]] <= 0:
        return None
    rank, below, lower = counts[bounds[-1]] * percent / 100, 0.0, 0.0
    for bound in bounds:
        count = max(counts[bound], below)  # increases of different buckets need not be of the same moment
        if count >= rank and count > below:
            if math.isinf(bound):
                return Quantile(lower, lower, None)
            value = lower + (bound - lower) * max(0.0, rank - below) / (count - below)
            return Quantile(value, lower, bound)
        below, lower = count, bound
    return Quantile(lower, lower, None)


def bucket_percentiles(counts: Mapping[float, float]) -> Percentiles:
    """All percentiles of a histogram's counts."""
    count = round(max(counts.values(), default=0.0))
    return Percentiles(count, *(bucket_quantile(counts, percent) for percent in PERCENTILES))


Reason = Literal["silent", "failing"]
Indicator = Literal[
    "availability", "error_rate", "mttr", "first_token_p95", "between_tokens_p95", "end_to_end_p95"
]


class Requests(msgspec.Struct, frozen=True):
    """How requests ended. `completed` and `failed` are what rates are of."""

    completed: int = 0
    failed: int = 0
    """By a fault of ours: 5xx, an error within a stream, no end at all."""
    refused: int = 0
    """What the client must change, and limits: 4xx. Counted by Prometheus alone."""
    cancelled: int = 0
    """By their clients."""
    batch_lines: int = 0
    """Of batches, whose times and errors are no part of the rest; counted by the journal alone."""

    @property
    def error_rate(self) -> float | None:
        judged = self.completed + self.failed
        return self.failed / judged if judged else None


class Tokens(msgspec.Struct, frozen=True):
    prompt: int = 0
    cached: int = 0
    """Of the prompts' tokens, those found in the KV cache."""
    output: int = 0


class Outage(msgspec.Struct, frozen=True):
    begin: float
    end: float
    reasons: list[Reason]
    ongoing: bool
    """Whether it had not ended when the recording did."""


class Failovers(msgspec.Struct, frozen=True):
    """Generations that went on in another ring, or in a ring's next life; of the journal alone."""

    count: int = 0
    interruption: Percentiles = Percentiles(0)
    """From the last tokens before to the first behind it."""


class Scope(msgspec.Struct, frozen=True):
    model: str
    """Empty: all."""
    requests: Requests
    error_rate: float | None
    availability: float | None
    """Share of the covered time in which there was no outage."""
    downtime: float
    outages: list[Outage]
    """Of the journal alone."""
    repaired: int
    mttr: float | None
    """Mean time to recovery: of the journal over outages whose beginning and end are both covered, of Prometheus the
    downtime for each recovery; null: there was none."""
    first_token: Percentiles
    between_tokens: Percentiles
    end_to_end: Percentiles
    tokens: Tokens
    failovers: Failovers = Failovers()


class Verdict(msgspec.Struct, frozen=True):
    """An indicator against its target, in the worst of the scopes that know it."""

    indicator: Indicator
    target: float
    """At least so much availability; at most so much of the others."""
    actual: float | None
    model: str
    """The worst scope's; empty: all models together."""
    met: bool
    """False too where the source tells nothing of it: what is not shown is not met."""


class Report(msgspec.Struct, frozen=True):
    source: str
    begin: float
    """Of the period that was asked for."""
    end: float
    covered: list[tuple[float, float]]
    """The parts of it that the source knows."""
    scopes: list[Scope]
    """All models together, then each."""
    verdicts: list[Verdict]
    notes: list[str]
    """What a reader must know to judge the figures."""

    @property
    def met(self) -> bool:
        return all(verdict.met for verdict in self.verdicts)


def scope_of(
    model: str,
    requests: Requests,
    causes: Iterable[tuple[Reason, Interval]],
    covered: Sequence[Interval],
    **figures: Any,
) -> Scope:
    """With what follows from `requests` and from `causes` of downtime; `figures`: the other fields.

    Causes that overlap are one outage. What is not covered is neither up nor down.
    """
    causes = [
        (reason, Interval(max(one.begin, edge.begin), min(one.end, edge.end)))
        for reason, one in causes
        for edge in covered
        if one.begin < edge.end and edge.begin < one.end
    ]
    union = merged(interval for _, interval in causes)
    last = max((edge.end for edge in covered), default=0.0)
    outages = [
        Outage(
            whole.begin,
            whole.end,
            sorted({reason for reason, one in causes if one.begin < whole.end and whole.begin < one.end}),
            whole.end >= last,
        )
        for whole in union
    ]
    known, down, repaired = length_of(covered), length_of(union), repairs(union, covered)
    return Scope(
        model=model,
        requests=requests,
        error_rate=requests.error_rate,
        availability=1 - down / known if known else None,
        downtime=down,
        outages=outages,
        repaired=repaired.number,
        mttr=repaired.mean,
        **figures,
    )


def judge(targets: Mapping[Indicator, float], scopes: Sequence[Scope]) -> list[Verdict]:
    """Each target against the worst scope that knows its indicator: a model that fails must not vanish among
    others that are asked for more often."""
    return [_verdict(indicator, target, scopes) for indicator, target in targets.items()]


def _verdict(indicator: Indicator, target: float, scopes: Sequence[Scope]) -> Verdict:
    if indicator == "mttr":
        # Nothing to repair is repaired at once; an outage that goes on has not been repaired so far.
        known = [(_repair_time(scope), scope.model) for scope in scopes]
        worst, model = max(known, default=(0.0, ""))
        return Verdict(indicator, target, worst, model, worst <= target)
    values = [(value, scope.model) for scope in scopes if (value := _value(indicator, scope)) is not None]
    if not values:
        return Verdict(indicator, target, None, "", False)
    if indicator == "availability":
        least, model = min(values)
        return Verdict(indicator, target, least, model, least >= target)
    most, model = max(values)
    return Verdict(indicator, target, most, model, most <= target)


def _repair_time(scope: Scope) -> float:
    going_on = (outage.end - outage.begin for outage in scope.outages if outage.ongoing)
    return max((scope.mttr or 0.0, *going_on))


def _value(indicator: Indicator, scope: Scope) -> float | None:
    if indicator == "availability":
        return scope.availability
    if indicator == "error_rate":
        return scope.error_rate
    found: Percentiles = getattr(scope, indicator.removesuffix("_p95"))
    return found.p95.value if found.p95 is not None else None


OUTAGES = 20
"""That are listed one by one; JSON has all."""
_NAMES = {
    "availability": "availability",
    "error_rate": "error rate",
    "mttr": "mean time to recovery",
    "first_token_p95": "first token, p95",
    "between_tokens_p95": "between tokens, p95",
    "end_to_end_p95": "end to end, p95",
}


class Table(NamedTuple):
    title: str
    rows: list[tuple[str, ...]]
    """The first has the headings."""


def tables(report: Report, zone: tzinfo) -> Iterator[Table]:
    """Everything of the report that is a table."""
    scopes = report.scopes
    yield Table(
        "Service",
        [
            (
                "model",
                "availability",
                "error rate",
                "completed",
                "failed",
                "refused",
                "cancelled",
                "batch lines",
            ),
            *map(_service, scopes),
        ],
    )
    yield Table(
        "Latency, p50 / p95 / p99",
        [
            ("model", "first token", "between tokens", "end to end"),
            *(
                (_model(one.model), *map(_three, (one.first_token, one.between_tokens, one.end_to_end)))
                for one in scopes
            ),
        ],
    )
    yield Table(
        "Recovery",
        [
            ("model", "outages", "downtime", "repaired", "MTTR", "failovers", "interruption p50 / p95 / p99"),
            *map(_recovery, scopes),
        ],
    )
    yield Table("Tokens", [("model", "prompt", "of them cached", "output"), *map(_tokens, scopes)])
    if scopes and scopes[0].outages:
        yield Table("Outages", [("begin", "end", "for", "why"), *_outages(scopes, zone)])
    if report.verdicts:
        yield Table(
            "Targets", [("target", "", "actual", "worst model", "met"), *map(_verdict_row, report.verdicts)]
        )


def lines(report: Report, zone: tzinfo) -> list[str]:
    """Which source and which period."""
    asked = report.end - report.begin
    covered = sum(end - begin for begin, end in report.covered)
    said = [
        f"Source: {report.source}",
        f"Period: {shown(report.begin, zone)} to {shown(report.end, zone)} ({seconds(asked)})",
    ]
    if covered < asked - 1:
        parts = ", ".join(f"{shown(begin, zone)} to {shown(end, zone)}" for begin, end in report.covered)
        said.append(f"Covered: {covered / asked:.1%} of it: {parts}")
    return said


def print_report(report: Report, screen: Console, zone: tzinfo) -> None:
    for line in lines(report, zone):
        say(screen, line)
    for table in tables(report, zone):
        screen.print()
        say(screen, table.title, "bold")
        print_columns(screen, table.rows)
    if report.notes:
        screen.print()
    for note in report.notes:
        say(screen, f"Note: {note}")


def markdown(report: Report, zone: tzinfo) -> str:
    parts = ["# Service level report", "\n".join(f"- {line}" for line in lines(report, zone))]
    for table in tables(report, zone):
        head, *rows = (_row(row) for row in table.rows)
        rule = _row(["---"] * len(table.rows[0]))
        parts.append("\n".join([f"## {table.title}", "", head, rule, *rows]))
    parts += [f"> {note}" for note in report.notes]
    return "\n\n".join(parts)


def _row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _service(scope: Scope) -> tuple[str, ...]:
    requests = scope.requests
    counts = (requests.completed, requests.failed, requests.refused, requests.cancelled, requests.batch_lines)
    return (
        _model(scope.model),
        share(scope.availability),
        share(scope.error_rate),
        *(f"{one:,}" for one in counts),
    )


def _recovery(scope: Scope) -> tuple[str, ...]:
    mttr = "-" if scope.mttr is None else seconds(scope.mttr)
    down, failovers = seconds(scope.downtime), scope.failovers
    return (
        _model(scope.model),
        str(max(len(scope.outages), scope.repaired)),
        down,
        str(scope.repaired),
        mttr,
        f"{failovers.count:,}",
        _three(failovers.interruption),
    )


def _tokens(scope: Scope) -> tuple[str, ...]:
    tokens = scope.tokens
    return _model(scope.model), f"{tokens.prompt:,}", f"{tokens.cached:,}", f"{tokens.output:,}"


def _outages(scopes: Sequence[Scope], zone: tzinfo) -> Iterator[tuple[str, ...]]:
    outages = scopes[0].outages
    for outage in outages[:OUTAGES]:
        end = "goes on" if outage.ongoing else shown(outage.end, zone)
        length = seconds(outage.end - outage.begin)
        models = [
            one.model
            for one in scopes[1:]
            if any(own.begin < outage.end and outage.begin < own.end for own in one.outages)
        ]
        why = ", ".join(outage.reasons) + (f" ({', '.join(models)})" if models else "")
        yield shown(outage.begin, zone), end, length, why
    if len(outages) > OUTAGES:
        yield f"... {len(outages) - OUTAGES} more", "", "", "--format json has all"


def _verdict_row(verdict: Verdict) -> tuple[str, ...]:
    show = share if verdict.indicator in ("availability", "error_rate") else seconds
    sign = "at least" if verdict.indicator == "availability" else "at most"
    actual = "not known" if verdict.actual is None else show(verdict.actual)
    name = _NAMES[verdict.indicator]
    return (
        name,
        f"{sign} {show(verdict.target)}",
        actual,
        _model(verdict.model),
        "yes" if verdict.met else "NO",
    )


def _model(name: str) -> str:
    return name or "(all)"


def _three(found: Percentiles) -> str:
    if not found.count:
        return "-"
    return " / ".join(_quantile(one) for one in (found.p50, found.p95, found.p99))


def _quantile(found: Quantile | None) -> str:
    if found is None:
        return "-"
    return f"over {seconds(found.value)}" if found.at_most is None else seconds(found.value)


def share(value: float | None) -> str:
    """In per cent: with as many digits as a target of three nines needs."""
    return "-" if value is None else f"{value:.3%}"


def seconds(value: float) -> str:
    """A time that people can read."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.3g} min"
    return f"{value / 3600:.3g} h"
