"""A comparison for readers: a table of figures, one of ratios, and where they were made."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.peers.results import Comparison, PeerResult, Ratio
from benchmarks.report import number, remarks, spread
from benchmarks.serve.stats import Summary
from benchmarks.serve.workloads import WORKLOADS

_GIGABYTE = 1e9
RATIO_NOTE = (
    "Ryzanstein against each peer, medians of the same run; above 1 it is ahead."
    " Rate: its output tokens/s divided by theirs. First token: their time divided by its."
)


def workloads(peers: Sequence[PeerResult]) -> list[str]:
    """Those that anybody was measured with, in the order of their definition."""
    found = {name for peer in peers for name in peer.rounds}
    return [name for name in WORKLOADS if name in found]


def header(names: Sequence[str]) -> list[str]:
    return ["peer", "dtype", *map(_heading, names), "peak RSS", "ready"]


def _heading(name: str) -> str:
    if WORKLOADS[name].turns > 1:
        return f"{name} first token by turn"
    return f"{name} tok/s, first token, gap"


def row(peer: PeerResult, medians: Mapping[str, Summary], names: Sequence[str]) -> list[str]:
    """One row under `header(names)`; a dash stands for what was not measured."""
    memory, ready = peer.peak_rss(), peer.ready()
    return [
        peer.title,
        peer.dtype,
        *(_cell(medians.get(name)) for name in names),
        f"{memory / _GIGABYTE:.1f} GB" if memory is not None else "-",
        f"{number(ready)} s" if ready is not None else "-",
    ]


def _cell(summary: Summary | None) -> str:
    if summary is None or summary.first_token_ms is None:
        return "-"
    if WORKLOADS[summary.workload].turns > 1:
        return "/".join(number(turn.first_token_ms) for turn in summary.turns) or "-"
    rate = number(summary.output_tokens_per_second)
    return f"{rate}, {spread(summary.first_token_ms)}, {spread(summary.gap_ms)}"


def ratio_header(names: Sequence[str]) -> list[str]:
    return ["against", *(f"{name} {kind}" for name in names for kind in _kinds(name))]


def _kinds(name: str) -> tuple[str, ...]:
    return ("first token by turn",) if WORKLOADS[name].turns > 1 else ("rate", "first token")


def ratio_row(ratio: Ratio, title: str, names: Sequence[str]) -> list[str]:
    """One row under `ratio_header(names)`."""
    cells = [title]
    for name in names:
        if WORKLOADS[name].turns > 1:
            cells.append("/".join(map(_factor, ratio.first_token_by_turn.get(name, []))) or "-")
        else:
            cells += [_optional(ratio.tokens_per_second.get(name)), _optional(ratio.first_token.get(name))]
    return cells


def _optional(value: float | None) -> str:
    return "-" if value is None else _factor(value)


def _factor(value: float) -> str:
    return f"{value:.2f}"


def notes(comparison: Comparison) -> list[str]:
    """Remarks on every peer, what is installed, and the setting; a line each."""
    lines: list[str] = []
    for peer in comparison.peers:
        found = [*peer.remarks, *remarks(list(comparison.medians[peer.name].values()))]
        lines += [f"{peer.name}: {remark}" for remark in found]
        if peer.left_out is not None:
            lines.append(f"{peer.name} was left out: {peer.left_out}")
    for peer in comparison.peers:
        if peer.versions:
            lines.append(f"{peer.name}: {_listed(peer.versions)}.")
    setting = comparison.setting
    lines += [
        f"Machine: {setting.machine}; {setting.threads} threads for every server.",
        f"Model {setting.model}, {setting.date}, medians of {setting.rounds} interleaved rounds on fresh"
        f" servers, seed {setting.seed}; load client on the same machine: {_listed(setting.versions)}.",
    ]
    return lines


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def show(comparison: Comparison, console: Console) -> None:
    """The tables for a terminal."""
    names = workloads(comparison.peers)
    for head, rows in _tables(comparison, names):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for at, column in enumerate(head):
            table.add_column(column, justify="left" if at == 0 else "right", overflow="fold")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    lines = [RATIO_NOTE] if comparison.ratios else []
    for line in [*lines, *notes(comparison), f"Command: {comparison.setting.command}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(comparison: Comparison) -> str:
    """The same as Markdown, to be put into the documentation as it is."""
    names = workloads(comparison.peers)
    lines = [f"`{comparison.setting.command}`", ""]
    for at, (head, rows) in enumerate(_tables(comparison, names)):
        if at == 1:
            lines += [RATIO_NOTE, ""]
        lines += [_line(head), "| --- |" + " ---: |" * (len(head) - 1), *map(_line, rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(comparison))]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _tables(comparison: Comparison, names: Sequence[str]) -> list[tuple[list[str], list[list[str]]]]:
    peers = {peer.name: peer for peer in comparison.peers}
    figures = [row(peer, comparison.medians[peer.name], names) for peer in comparison.peers]
    tables = [(header(names), figures)]
    if comparison.ratios:
        against = [_label(peers[ratio.peer]) for ratio in comparison.ratios]
        rows = [
            ratio_row(ratio, label, names) for ratio, label in zip(comparison.ratios, against, strict=True)
        ]
        tables.append((ratio_header(names), rows))
    return tables


def _label(peer: PeerResult) -> str:
    return f"{peer.title} ({peer.dtype})"
