"""What `control_plane.py` finds: its runs, which of them count, and how they are shown."""

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.control_plane.load_client import Figures
from benchmarks.serve.stats import Spread


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one system."""

    system: str
    figures: Figures
    cpu_ms: dict[str, float]
    """CPU milliseconds per right request, by process; the client's too."""

    @property
    def cpu_total(self) -> float:
        return sum(self.cpu_ms.values())


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """What comes on top of the engine's own time at a set speed."""

    step_ms: float
    streams: float
    """Open at once, in the mean."""
    first_token_ms: float
    """Median time to the first token, less one step and the half step that is under way at an arrival."""
    token_ms: float
    """Median time per later token, less one step."""
    cpu_us_per_token: dict[str, float]
    """By process; the client's too."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a run; written as it is by `--json`."""

    date: str
    command: str
    machine: str
    versions: dict[str, str]
    tokens: int
    connections: int
    closed: dict[str, list[Measured]]
    """By system, round by round."""
    searched: list[Measured]
    """Every rate that was tried in the open loop."""
    highest: Measured | None
    """The run of the highest rate that kept the limit."""
    added: Added | None
    left_out: dict[str, str]
    """Why a system was not measured."""


def holds(measured: Measured, limit_ms: float) -> bool:
    """Whether nothing was dropped or wrong and the 99th percentile is below the limit."""
    whole = measured.figures.whole_ms
    return measured.figures.clean and whole is not None and whole.p99 < limit_ms


def highest(tried: Sequence[Measured], limit_ms: float) -> Measured | None:
    """The run with the most requests per second that held."""
    held = [each for each in tried if holds(each, limit_ms)]
    return max(held, key=lambda each: each.figures.requests_per_second, default=None)


def median_run(runs: Sequence[Measured]) -> Measured:
    """The run whose rate is the median."""
    middle = statistics.median_low(run.figures.requests_per_second for run in runs)
    return next(run for run in runs if run.figures.requests_per_second == middle)


def _text_of(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.1f} / {spread.p99:.1f}"


def _row(name: str, run: Measured) -> list[str]:
    figures = run.figures
    return [
        name,
        f"{figures.requests_per_second:,.0f}",
        f"{figures.events_per_second:,.0f}",
        _text_of(figures.whole_ms),
        _text_of(figures.first_ms),
        ", ".join(f"{count} {fault}" for fault, count in figures.faults.items()) or "none",
        f"{run.cpu_total:.2f}",
        ", ".join(f"{part} {cpu:.2f}" for part, cpu in run.cpu_ms.items()),
    ]


def show(outcome: Outcome, limit_ms: float, console: Console) -> None:
    table = Table(
        "load",
        "requests/s",
        "events/s",
        "whole p50/p99 ms",
        "first p50/p99 ms",
        "faults",
        "CPU ms/request",
        "of which",
        title=f"{outcome.tokens} tokens a request; {outcome.machine}",
    )
    for name, runs in outcome.closed.items():
        table.add_row(*_row(f"{name}, {outcome.connections} at once", median_run(runs)))
    if outcome.highest is not None:
        table.add_row(*_row(f"ryzanstein, open loop, p99 below {limit_ms:g} ms", outcome.highest))
    console.print(table)
    if outcome.searched and outcome.highest is None:
        console.print(f"No rate kept the 99th percentile below {limit_ms:g} ms.")
    console.print(*_remarks(outcome), sep="\n", soft_wrap=True)


def _remarks(outcome: Outcome) -> list[str]:
    lines = []
    if (ours := outcome.closed.get("ryzanstein")) and (theirs := outcome.closed.get("dynamo")):
        ratio = statistics.median(
            a.figures.requests_per_second / b.figures.requests_per_second
            for a, b in zip(ours, theirs, strict=True)
        )
        lines.append(f"Requests/s against Dynamo in the same run: {ratio:.2f}")
    if (added := outcome.added) is not None:
        cpu = ", ".join(f"{part} {each:.0f}" for part, each in added.cpu_us_per_token.items())
        lines.append(
            f"Added at {added.step_ms:g} ms a step with {added.streams:.0f} streams: first token "
            f"{added.first_token_ms:.2f} ms, each next token {added.token_ms:.2f} ms; "
            f"CPU us per token: {sum(added.cpu_us_per_token.values()):.0f} ({cpu})."
        )
    lines += [f"{name} was left out: {reason}" for name, reason in outcome.left_out.items()]
    return lines


def faulty(outcome: Outcome) -> bool:
    """Whether a response was wrong, or a system could not be measured."""
    runs = [run for runs in outcome.closed.values() for run in runs]
    return bool(outcome.left_out) or any(not run.figures.clean for run in runs)
