"""What a run prints: a table for the terminal, Markdown for the documentation, JSON for machines."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.serve.stats import Spread, Summary

_COLUMNS = (
    "workload",
    "requests",
    "output tok/s",
    "first token p50/p99 ms",
    "gap p50/p99 ms",
    "whole request p50/p99 ms",
    "errors",
    "first token by turn, ms",
)
_PACKAGES = ("ryzanstein", "uvloop", "httptools", "torch", "transformers")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Where, when and how a report was made."""

    date: str
    command: str
    url: str
    model: str
    seed: int
    machine: str
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a run; written as it is by `--json`."""

    setting: Setting
    summaries: list[Summary]
    """One per workload: medians over the rounds."""
    rounds: list[list[Summary]]
    """The same, round by round."""


def machine() -> str:
    """CPU model, usable cores and memory of this machine, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [_proc("cpuinfo", "model name") or platform.processor() or platform.machine(), f"{cores} cores"]
    if total := _proc("meminfo", "MemTotal"):
        parts.append(f"{int(total.split()[0]) / 2**20:.0f} GiB")
    return ", ".join([*parts, f"{platform.system()} {platform.release().split('-')[0]}"])


def _proc(file: str, key: str) -> str | None:
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def versions() -> dict[str, str]:
    """Of Python and the packages that matter, as installed where the load client runs."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


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


def peers_row(summaries: Sequence[Summary]) -> str | None:
    """W1 to W4 in the cells of the peers' table, or None if one of them was not run."""
    by_name = {each.workload: each for each in summaries}
    if not {"W1", "W2", "W3", "W4"} <= by_name.keys():
        return None
    one = by_name["W1"]
    first = ", ".join(
        [number(one.output_tokens_per_second), *(_p50(s) for s in (one.first_token_ms, one.gap_ms))]
    )
    loaded = [
        ", ".join([number(each.output_tokens_per_second), spread(each.first_token_ms), spread(each.gap_ms)])
        for each in (by_name["W2"], by_name["W3"])
    ]
    turns = "/".join(number(turn.first_token_ms) for turn in by_name["W4"].turns) or "-"
    return "| " + " | ".join([first, *loaded, turns]) + " |"


def _p50(value: Spread | None) -> str:
    return number(value.p50) if value is not None else "-"


def show(report: Report, console: Console) -> None:
    """The table for a terminal, with where it was made beneath."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if at == 0 else "right", overflow="fold")
    for summary in report.summaries:
        table.add_row(*cells(summary), style="red" if summary.errors else None)
    console.print(table)
    for line in [*remarks(report.summaries), *_setting_lines(report.setting)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The same as Markdown, to be put into the documentation as it is."""
    setting = report.setting
    rows = ["| " + " | ".join(row) + " |" for row in (_COLUMNS, *map(cells, report.summaries))]
    rows.insert(1, "| --- |" + " ---: |" * (len(_COLUMNS) - 1))
    lines = [f"`{setting.command}`", "", *rows, ""]
    if (row := peers_row(report.summaries)) is not None:
        lines += [
            "| W1 tok/s, first token, gap | W2 tok/s, first token, gap | W3 tok/s, first token, gap"
            " | W4 first token by turn |",
            "| --- | --- | --- | --- |",
            row,
            "",
        ]
    lines += [f"- {line}" for line in [*remarks(report.summaries), *_setting_lines(setting)[:-1]]]
    return "\n".join(lines) + "\n"


def _setting_lines(setting: Setting) -> list[str]:
    installed = ", ".join(f"{name} {number}" for name, number in setting.versions.items())
    return [
        f"Machine: {setting.machine}.",
        f"Model {setting.model} at {setting.url}, {setting.date}, seed {setting.seed}; {installed}.",
        f"Command: {setting.command}",
    ]
