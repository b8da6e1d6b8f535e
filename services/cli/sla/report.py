"""What a report says, whether its targets are met, and how it is shown: a table, Markdown, or JSON, whose shape
(`ryzanstein sla --format json`) scripts rely on.

Shares are between 0 and 1, times in seconds, moments in unix seconds; null: not known, or there was nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import tzinfo
from typing import Any, Literal

import msgspec
from rich.console import Console

from services.cli.sla.periods import Interval, local_time
from services.cli.ui import print_columns, say
from shared.errors import RyzansteinError

GROWTH = 1.01  # upper over lower bound of a bucket of the journal's latencies: each is known within 1%
SMALLEST = 1e-6  # seconds; what is shorter counts as this
TIMES = ("first_token", "between_tokens", "end_to_end", "interruption")
OUTAGES = 20  # that are listed one by one; JSON has all

Reason = Literal["silent", "failing"]
Indicator = Literal["availability", "error_rate", "mttr", "first_token_p95", "between_tokens_p95", "end_to_end_p95"]


class NoData(RyzansteinError):
    """The source knows nothing of the period."""


class Quantile(msgspec.Struct, frozen=True):
    """A percentile of latencies; the exact one lies between the bounds. None: longer than the source tells."""

    value: float
    at_least: float
    at_most: float | None


class Percentiles(msgspec.Struct, frozen=True):
    count: int = 0
    p50: Quantile | None = None
    p95: Quantile | None = None
    p99: Quantile | None = None


class Requests(msgspec.Struct, frozen=True):
    """How requests ended (docs/sla.md); the journal alone counts lines of batches, apart from the rest."""

    completed: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    batch_lines: int = 0

    @property
    def error_rate(self) -> float | None:
        judged = self.completed + self.failed
        return self.failed / judged if judged else None


class Tokens(msgspec.Struct, frozen=True):
    """`cached`: of the prompts' tokens, those found in the KV cache."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class Outage(msgspec.Struct):
    """`ongoing`: it had not ended when what the source covers did."""

    begin: float
    end: float
    reasons: list[Reason]
    ongoing: bool = False


class Failovers(msgspec.Struct, frozen=True):
    """Generations that went on in another ring, or in a ring's next life; of the journal alone."""

    count: int = 0
    interruption: Percentiles = Percentiles()


class ReportScope(msgspec.Struct, frozen=True, kw_only=True):
    """One model, or all (an empty name). The journal alone has `outages` one by one; its `mttr` is of those whose
    beginning and end are both covered, Prometheus' the downtime for each recovery."""

    model: str
    requests: Requests
    error_rate: float | None
    availability: float | None
    downtime: float
    outages: list[Outage] = []
    repaired: int
    mttr: float | None
    first_token: Percentiles
    between_tokens: Percentiles
    end_to_end: Percentiles
    tokens: Tokens
    failovers: Failovers = Failovers()


class TargetResult(msgspec.Struct, frozen=True):
    """An indicator against its target, in the worst of the scopes that know it. What no source shows is not met."""

    indicator: Indicator
    target: float
    actual: float | None
    model: str
    met: bool


class Report(msgspec.Struct):
    """`covered`: the parts of the period that the source knows. `scopes`: all models together, then each."""

    source: str
    begin: float
    end: float
    covered: list[Interval]
    scopes: list[ReportScope]
    notes: list[str]
    verdicts: list[TargetResult] = []

    @property
    def share_covered(self) -> float:
        return sum(one.seconds for one in self.covered) / (self.end - self.begin)


# --- figures -------------------------------------------------------------------------------------


def percentiles(counts: Mapping[float, float]) -> Percentiles:
    """Of a histogram: how many values were at most as long as each bound (cumulative; one bound is infinity)."""
    count = round(max(counts.values(), default=0.0))
    return Percentiles(count, *(quantile(counts, percent) for percent in (50, 95, 99)))


def quantile(counts: Mapping[float, float], percent: float) -> Quantile | None:
    """As Prometheus' `histogram_quantile`: linear within a bucket, the last finite bound for what lies behind it."""
    if not counts.get(math.inf):
        return None
    rank, below, lower = counts[math.inf] * percent / 100, 0.0, 0.0
    for bound in sorted(counts):
        count = max(counts[bound], below)  # increases of different buckets need not be of the same moment
        if count >= rank and count > below:
            if math.isinf(bound):
                return Quantile(lower, lower, None)
            value = lower + (bound - lower) * max(0.0, rank - below) / (count - below)
            return Quantile(value, lower, bound)
        below, lower = count, bound
    return None


class Latencies(Counter[int]):
    """Values in buckets of 1% each, of which the key is the exponent: memory does not grow with their number."""

    def add(self, seconds: float) -> None:
        self[math.ceil(math.log(max(seconds, SMALLEST), GROWTH))] += 1

    def percentiles(self) -> Percentiles:
        counts: dict[float, float] = {}
        below = 0
        for bucket, count in sorted(self.items()):
            counts |= {GROWTH ** (bucket - 1): below, GROWTH**bucket: below + count}
            below += count
        return percentiles(counts | {math.inf: below})


def outages_of(causes: Iterable[tuple[Interval, Reason]], covered: Interval) -> list[Outage]:
    """In order; causes that overlap are one outage, and what is not covered is none."""
    found: list[Outage] = []
    for cause, reason in sorted(causes):
        begin, end = max(cause.begin, covered.begin), min(cause.end, covered.end)
        if begin >= end:
            continue
        if found and begin <= found[-1].end:
            last = found[-1]
            last.end, last.reasons = max(last.end, end), sorted({*last.reasons, reason})
        else:
            found.append(Outage(begin, end, [reason]))
    for outage in found:
        outage.ongoing = outage.end >= covered.end
    return found


def scope_of(model: str, counts: Mapping[str, float], times: Mapping[str, Percentiles], **figures: Any) -> ReportScope:
    """`counts` by the fields of `Requests` and `Tokens`, `times` by those of latencies; `figures`: other fields."""
    whole = {name: round(count) for name, count in counts.items()}
    requests = msgspec.convert(whole, Requests)
    first_token, between_tokens, end_to_end, interruption = (times.get(name, Percentiles()) for name in TIMES)
    return ReportScope(
        model=model,
        requests=requests,
        error_rate=requests.error_rate,
        first_token=first_token,
        between_tokens=between_tokens,
        end_to_end=end_to_end,
        tokens=msgspec.convert(whole, Tokens),
        failovers=Failovers(interruption.count, interruption),
        **figures,
    )


def judge(targets: Mapping[Indicator, float], scopes: Sequence[ReportScope]) -> list[TargetResult]:
    """Each target against the worst scope: a model that fails must not vanish among others that are busier."""
    found = []
    for indicator, target in targets.items():
        values = [(value, scope.model) for scope in scopes if (value := _value(indicator, scope)) is not None]
        at_least = indicator == "availability"
        actual, model = (min if at_least else max)(values, default=(None, ""))
        met = actual is not None and (actual >= target if at_least else actual <= target)
        found.append(TargetResult(indicator, target, actual, model, met))
    return found


def _value(indicator: Indicator, scope: ReportScope) -> float | None:
    # Without outages nothing had to be repaired; one that goes on has not been so far.
    if indicator == "mttr":
        return max((scope.mttr or 0.0, *(one.end - one.begin for one in scope.outages if one.ongoing)))
    found: Percentiles | float | None = getattr(scope, indicator.removesuffix("_p95"))
    if isinstance(found, Percentiles):
        return found.p95.value if found.p95 is not None else None
    return found


# --- how it is shown -----------------------------------------------------------------------------

Rows = list[tuple[str, ...]]  # the first has the headings

_SECTIONS: dict[str, dict[str, Callable[[ReportScope], str]]] = {
    "Service": {
        "availability": lambda scope: share(scope.availability),
        "error rate": lambda scope: share(scope.error_rate),
        "completed": lambda scope: f"{scope.requests.completed:,}",
        "failed": lambda scope: f"{scope.requests.failed:,}",
        "refused": lambda scope: f"{scope.requests.refused:,}",
        "cancelled": lambda scope: f"{scope.requests.cancelled:,}",
        "batch lines": lambda scope: f"{scope.requests.batch_lines:,}",
    },
    "Latency, p50 / p95 / p99": {
        "first token": lambda scope: _three(scope.first_token),
        "between tokens": lambda scope: _three(scope.between_tokens),
        "end to end": lambda scope: _three(scope.end_to_end),
    },
    "Recovery": {
        "outages": lambda scope: str(max(len(scope.outages), scope.repaired)),
        "downtime": lambda scope: seconds(scope.downtime),
        "repaired": lambda scope: str(scope.repaired),
        "MTTR": lambda scope: "-" if scope.mttr is None else seconds(scope.mttr),
        "failovers": lambda scope: f"{scope.failovers.count:,}",
        "interruption p50 / p95 / p99": lambda scope: _three(scope.failovers.interruption),
    },
    "Tokens": {
        "prompt": lambda scope: f"{scope.tokens.prompt:,}",
        "of them cached": lambda scope: f"{scope.tokens.cached:,}",
        "output": lambda scope: f"{scope.tokens.output:,}",
    },
}
_NAMES = {"error_rate": "error rate", "mttr": "mean time to recovery"}


def tables(report: Report, zone: tzinfo) -> Iterator[tuple[str, Rows]]:
    """Titles and rows."""
    for title, columns in _SECTIONS.items():
        rows = [(_model(scope.model), *(cell(scope) for cell in columns.values())) for scope in report.scopes]
        yield title, [("model", *columns), *rows]
    if report.scopes[0].outages:
        yield "Outages", [("begin", "end", "for", "why"), *_outages(report.scopes, zone)]
    if report.verdicts:
        head = ("target", "", "actual", "worst model", "met")
        yield "Targets", [head, *map(_verdict_row, report.verdicts)]


def lines(report: Report, zone: tzinfo) -> list[str]:
    """Which source and which period."""
    period = Interval(report.begin, report.end)
    said = [f"Source: {report.source}", f"Period: {_span(period, zone)} ({seconds(period.seconds)})"]
    if report.share_covered < 1 - 1 / period.seconds:
        parts = ", ".join(_span(one, zone) for one in report.covered)
        said.append(f"Covered: {report.share_covered:.1%} of it, and the figures are of that part: {parts}")
    return said


def print_report(report: Report, screen: Console, zone: tzinfo) -> None:
    for line in lines(report, zone):
        say(screen, line)
    for title, rows in tables(report, zone):
        say(screen, f"\n{title}", "bold")
        print_columns(screen, rows)
    if report.notes:
        screen.print()
    for note in report.notes:
        say(screen, f"Note: {note}")


def markdown(report: Report, zone: tzinfo) -> str:
    parts = ["# Service level report", "\n".join(f"- {line}" for line in lines(report, zone))]
    for title, (head, *rows) in tables(report, zone):
        body = "\n".join(map(_row, (head, ["---"] * len(head), *rows)))
        parts.append(f"## {title}\n\n{body}")
    return "\n\n".join([*parts, *(f"> {note}" for note in report.notes)])


def _row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _outages(scopes: Sequence[ReportScope], zone: tzinfo) -> Iterator[tuple[str, ...]]:
    whole, *single = scopes
    for outage in whole.outages[:OUTAGES]:
        models = [
            scope.model
            for scope in single
            if any(own.begin < outage.end and outage.begin < own.end for own in scope.outages)
        ]
        end = "goes on" if outage.ongoing else local_time(outage.end, zone)
        why = ", ".join(outage.reasons) + (f" ({', '.join(models)})" if models else "")
        yield local_time(outage.begin, zone), end, seconds(outage.end - outage.begin), why
    if len(whole.outages) > OUTAGES:
        yield f"... {len(whole.outages) - OUTAGES} more", "", "", "--format json has all"


def _verdict_row(verdict: TargetResult) -> tuple[str, ...]:
    show = share if verdict.indicator in ("availability", "error_rate") else seconds
    sign = "at least" if verdict.indicator == "availability" else "at most"
    actual = "not known" if verdict.actual is None else show(verdict.actual)
    name = _NAMES.get(verdict.indicator) or verdict.indicator.replace("_p95", ", p95").replace("_", " ")
    met = "yes" if verdict.met else "NO"
    return name, f"{sign} {show(verdict.target)}", actual, _model(verdict.model), met


def _model(name: str) -> str:
    return name or "(all)"


def _span(interval: Interval, zone: tzinfo) -> str:
    return f"{local_time(interval.begin, zone)} to {local_time(interval.end, zone)}"


def _three(found: Percentiles) -> str:
    if not found.count:
        return "-"
    return " / ".join(map(_quantile, (found.p50, found.p95, found.p99)))


def _quantile(found: Quantile | None) -> str:
    if found is None:
        return "-"
    return f"over {seconds(found.value)}" if found.at_most is None else seconds(found.value)


def share(value: float | None) -> str:
    """In per cent: with as many digits as a target of three nines needs."""
    return "-" if value is None else f"{value:.3%}"


def seconds(value: float) -> str:
    """A time that people can read."""
    for limit, unit, length in ((1, "ms", 1e-3), (120, "s", 1), (7200, "min", 60)):
        if value < limit:
            return f"{value / length:.3g} {unit}"
    return f"{value / 3600:.3g} h"
