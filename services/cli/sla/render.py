"""A report for people: on the terminal, or as Markdown."""

from collections.abc import Iterator, Sequence
from datetime import tzinfo
from typing import NamedTuple

from rich.console import Console

from services.cli.sla.latencies import Percentiles, Quantile
from services.cli.sla.periods import shown
from services.cli.sla.report import Report, Scope, Verdict
from services.cli.ui import print_columns

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
    yield Table(
        "Tokens",
        [("model", "prompt", "of them cached", "output"), *map(_tokens, scopes)],
    )
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
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    for table in tables(report, zone):
        screen.print()
        screen.print(table.title, style="bold", markup=False, highlight=False)
        print_columns(screen, table.rows)
    if report.notes:
        screen.print()
    for note in report.notes:
        screen.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


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
    counts = (
        requests.completed,
        requests.failed,
        requests.refused,
        requests.cancelled,
        requests.batch_lines,
    )
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
