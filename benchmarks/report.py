"""What a run prints: a table for the terminal, Markdown for the documentation, JSON for machines."""

from collections.abc import Sequence

import msgspec

from benchmarks.harness import Report, Sheet
from benchmarks.serve.stats import Spread, Summary

_COLUMNS = (
    "workload",
    "requests",
    "output tok/s",
    "first token p50/p99 ms",
    "gap p50/p99 ms",
    "longest pause p50/p99 ms",
    "whole request p50/p99 ms",
    "errors",
    "first token by turn, ms",
)


class Setting(Report, frozen=True, kw_only=True):
    """Where, when and how it was made."""

    url: str
    model: str
    seed: int

    def lines(self) -> list[str]:
        installed = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [
            f"Machine: {self.machine}.",
            f"Model {self.model} at {self.url}, {self.date}, seed {self.seed}; {installed}.",
        ]


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a run; written as it is by `--json`."""

    setting: Setting
    summaries: list[Summary]  # one per workload: medians over the rounds
    rounds: list[list[Summary]]  # the same, round by round


def cells(summary: Summary) -> tuple[str, ...]:
    """One row under the columns of the table."""
    times = f" x {summary.rounds}" if summary.rounds > 1 else ""
    succeeded = summary.first_token_ms is not None
    return (
        summary.workload,
        f"{summary.requests}{times}",
        number(summary.output_tokens_per_second) if succeeded else "-",
        spread(summary.first_token_ms),
        spread(summary.gap_ms),
        spread(summary.pause_ms),
        spread(summary.request_ms),
        str(summary.errors),
        "/".join(number(turn.first_token_ms) for turn in summary.turns),
    )


def spread(value: Spread | None) -> str:
    return f"{number(value.p50)}/{number(value.p99)}" if value is not None else "-"


def number(value: float) -> str:
    """Three digits are as many as these measurements bear: one decimal below 20, none above."""
    return f"{value:.1f}" if value < 20 else f"{value:.0f}"


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """Warnings and the kinds of errors, a sentence each."""
    found = [f"{each.workload}: {warning}." for each in summaries for warning in each.warnings]
    found += [
        f"{each.workload}: {count} x error: {message}"
        for each in summaries
        for message, count in list(each.error_messages.items())[:5]
    ]
    return found + [_computed(each) for each in summaries if each.turns]


def _computed(summary: Summary) -> str:
    """What the first tokens of the turns had to wait for."""
    new = [turn.prompt_tokens - turn.cached_tokens for turn in summary.turns]
    each = [turn.first_token_ms / max(tokens, 1) for turn, tokens in zip(summary.turns, new, strict=True)]
    return (
        f"{summary.workload}: prompt tokens not found in the cache, by turn: {'/'.join(map(number, new))}; "
        f"ms to the first token for each of them: {'/'.join(f'{ms:.2f}' for ms in each)}."
    )


def sheet(report: ServeReport) -> Sheet:
    styles = ["red" if each.errors else None for each in report.summaries]
    return Sheet(_COLUMNS, [cells(each) for each in report.summaries], styles=styles)


def parts(report: ServeReport) -> list[Sheet | str]:
    """For a terminal, with where it was made beneath."""
    setting = report.setting
    return [sheet(report), *remarks(report.summaries), *setting.lines(), f"Command: {setting.command}"]


def markdown(report: ServeReport) -> str:
    """The same as Markdown, to be put into the documentation as it is."""
    lines = [f"`{report.setting.command}`", "", sheet(report).markdown()]
    lines += [f"- {line}" for line in [*remarks(report.summaries), *report.setting.lines()]]
    return "\n".join(lines) + "\n"
