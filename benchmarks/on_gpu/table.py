"""A report as a table for the terminal and for docs/gpu.md, held against the aims. Pure."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from benchmarks.harness import Sheet
from benchmarks.on_gpu.bench import Report, Row, shown
from benchmarks.on_gpu.training_speed import GOAL_MINUTES

Verdict = Literal["met", "not met", "not measured"]


@dataclass(frozen=True)
class Aim:
    """One, and what became of it."""

    what: str
    verdict: Verdict
    found: str


def aims(report: Report) -> list[Aim]:
    """All of them. A dry run has measured none."""
    if report.dry_run:
        report = replace(report, sections=[])
    decode = "decode/8b/bf16/kv-bf16/1024/1"
    return [
        _share("85% of the bandwidth limit at batch 1 (8B, bf16, context 1024)", report.row(decode), 0.85),
        _share("60% of the matrix rate in prefill (8B, bf16, the best chunk)", _best(report, "prefill/bf16/"), 0.6),
        _kv(report),
        _int4(report),
        _below(
            "QLoRA of a 7B on 10,000 examples of 512 tokens in under an hour, projected",
            report.row("training/7b/q4_k/projected"),
            GOAL_MINUTES,
        ),
        _below("13B loaded in under 1 s from page cache", report.row("loading/load"), 1.0),
    ]


def _share(what: str, row: Row | None, wanted: float) -> Aim:
    if row is None or row.share is None:
        return Aim(what, "not measured", "")
    return Aim(what, "met" if row.share >= wanted else "not met", f"{row.share:.0%}, {shown(row.figure)} {row.unit}")


def _best(report: Report, prefix: str) -> Row | None:
    rows = [row for row in report.rows_under(prefix) if row.share is not None]
    return max(rows, key=lambda row: row.share or 0.0, default=None)


def _kv(report: Report) -> Aim:
    what = "fp8 KV not slower than bf16 KV (8B, bf16 weights)"
    pairs = []
    for row in report.rows_under("decode/8b/bf16/kv-bf16/"):
        other = report.row(row.key.replace("kv-bf16", "kv-fp8"))
        if other is not None and row.figure and other.figure:
            pairs.append((other.figure / row.figure, row.key))
    if not pairs:
        return Aim(what, "not measured", "")
    worst, key = min(pairs)
    case = "context {}, batch {}".format(*key.split("/")[-2:])
    # A hundredth is what two runs of one case differ by.
    return Aim(what, "met" if worst >= 0.99 else "not met", f"at least {worst:.2f} of its tokens/s ({case})")


def _int4(report: Report) -> Aim:
    what = "int4 weights twice as fast as bf16 at batch 1 (8B, context 1024)"
    four, plain = (report.row(f"decode/8b/{weights}/kv-bf16/1024/1") for weights in ("int4", "bf16"))
    if four is None or plain is None or not four.figure or not plain.figure:
        return Aim(what, "not measured", "")
    times = four.figure / plain.figure
    return Aim(what, "met" if times >= 2 else "not met", f"{times:.2f} times")


def _below(what: str, row: Row | None, limit: float) -> Aim:
    if row is None or row.figure is None:
        return Aim(what, "not measured", "")
    return Aim(what, "met" if row.figure < limit else "not met", f"{shown(row.figure)} {row.unit}")


# Between them stand the predictions, in a table whose first cells begin with the rows' keys, and what `--markdown`
# makes.
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def parts(report: Report) -> Iterator[Sheet | str]:
    """Everything in one table, then the aims."""
    rows: list[tuple[tuple[str, ...], str | None]] = []
    for section in report.sections:
        ended = f"{section.status}, {section.seconds:.0f} s"
        rows.append(((section.name, "", "", "", ended), "bold"))
        rows += [(cells(row), _style(row)) for row in section.rows]
        if section.status != "done":
            rows.append((("", "", "", "", " ".join(section.error[-1:])), "red"))
    yield Sheet(HEAD, [row for row, _ in rows], left=("note",), styles=[style for _, style in rows])
    for section in report.sections:
        if section.status in ("failed", "timed out"):
            yield "\n  ".join((f"{section.name} {section.status}:", *section.error))
    for aim in aims(report):
        yield f"{aim.verdict}: {aim.what}{': ' + aim.found if aim.found else ''}"


def _style(row: Row) -> str | None:
    if not row.ok:
        return "red"
    return "dim" if row.figure is None else None


HEAD = ("what", "figure", "limit", "share", "note")


def cells(row: Row) -> tuple[str, str, str, str, str]:
    figure = f"{shown(row.figure)} {row.unit}".rstrip() if row.figure is not None else "-"
    share = f"{row.share:.0%}" if row.share is not None else "-"
    note = row.note if row.ok else f"WRONG: {row.note}".rstrip(": ")
    return row.what, figure, shown(row.limit), share, note


# --- docs/gpu.md ---------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """What became of the aims, and every row."""
    found = [(aim.what, aim.verdict, aim.found or "-") for aim in aims(report)]
    return "\n".join([_table(("aim", "", ""), found), *_all(report)])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] | None = None) -> str:
    safe = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return Sheet(head, safe, left=head if left is None else left).markdown().replace("|  |", "| |")


def _measured(line: str, report: Report) -> str:
    """A row of the page's table of predictions, whose first cell has the key in backticks, with its figure."""
    cells = line.strip("| ").split(" | ")
    row = report.row(cells[0].partition("`")[2].partition("`")[0])
    if row is None:
        return line
    share = f", {row.share:.0%} of the limit" if row.share is not None else ""
    return f"| {' | '.join(cells[:-1])} | {shown(row.figure)} {row.unit}{share} ({where(report)}) |"


def _all(report: Report) -> Iterator[str]:
    driver, torch, triton = (report.machine.get(name, "unknown") for name in ("driver", "torch", "triton"))
    text = f"All rows of `{report.command}`, {where(report)}, driver {driver}, torch {torch}, Triton {triton}:"
    yield textwrap.fill(text, WIDTH, break_on_hyphens=False)
    yield ""
    rows = []
    for section in report.sections:
        for row in _told(section.rows):
            rows.append((*cells(row)[:4], row.note if row.ok else f"**wrong** {row.note}"))
        if section.status != "done":
            rows.append((f"section {section.name}", section.status, "-", "-", " ".join(section.error[-1:])))
    yield _table(HEAD, rows, left=("note",))


WIDTH = 120  # of a page's prose
FEW_CHECKS = 12  # that a page has one by one


def _told(rows: Sequence[Row]) -> list[Row]:
    """Those for a page: many checks that are right as one, and no sums over a ring of one, which adds nothing up."""
    right = [row for row in rows if row.unit == "error" and row.ok and row.limit]
    left = [row for row in rows if not row.key.startswith("collectives/1/")]
    if len(right) <= FEW_CHECKS:
        return left
    nearest = max(right, key=lambda row: (row.figure or 0.0) / (row.limit or 1.0))
    summary = f"checks of {right[0].what} and others: the error that is nearest to what is allowed"
    note = f"{nearest.what}; {len(right)} checks are right"
    return [replace(nearest, what=summary, note=note), *(row for row in left if row not in right)]


def where(report: Report) -> str:
    return f"{report.machine.get('card', 'unknown card')}, {report.date}"


def put_into(page: str, report: Report) -> str:
    """`page` with the figures beside their predictions, and all that was measured below. Raises ValueError where it has
    no place for them."""
    head, begin, rest = page.partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    predicted = table.strip().partition("\n\n")[0].splitlines()
    lines = [_measured(line, report) if line.startswith("| `") else line for line in predicted]
    return "\n".join([head + begin, *lines, "", markdown(report), end]) + tail
