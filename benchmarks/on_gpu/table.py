"""A report as a table for the terminal, and as one for docs/gpu.md."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.on_gpu.aims import Prediction, aims, predictions
from benchmarks.on_gpu.bench import shown
from benchmarks.on_gpu.rows import Report, Row, SectionResult

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Between them stands what `--markdown` makes."""
STYLES = {"met": "green", "not met": "red", "not measured": "dim"}


def show(report: Report, console: Console) -> None:
    """Everything in one table, then the aims."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", overflow="fold")
    for column in ("figure", "limit", "share"):
        table.add_column(column, justify="right")
    table.add_column("note", overflow="fold")
    for section in report.sections:
        table.add_row(*_heading(section), style="bold")
        for row in section.rows:
            table.add_row(*cells(row), style=_style(row))
        if section.status != "done":
            table.add_row("", "", "", "", _plain(" ".join(section.error[-1:])), style="red")
        table.add_section()
    console.print(table)
    for section in report.sections:
        if section.status in ("failed", "timed out"):
            console.print(f"{section.name} {section.status}:", style="red")
            for line in section.error:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for aim in aims(report):
        console.print(
            f"{aim.verdict}: {aim.what}{': ' + aim.found if aim.found else ''}",
            style=STYLES[aim.verdict],
            markup=False,
            highlight=False,
        )


def _heading(section: SectionResult) -> tuple[str, ...]:
    return section.name, "", "", "", f"{section.status}, {section.seconds:.0f} s"


def _style(row: Row) -> str | None:
    if not row.ok:
        return "red"
    return "dim" if row.figure is None else None


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """One row under the columns: what, figure, limit, share, note."""
    figure = f"{shown(row.figure)} {row.unit}".rstrip() if row.figure is not None else "-"
    share = f"{row.share:.0%}" if row.share is not None else "-"
    note = row.note if row.ok else f"WRONG: {row.note}".rstrip(": ")
    return _plain(row.what), figure, shown(row.limit), share, _plain(note)


def _plain(text: str) -> str:
    """Brackets of errors are no markup."""
    return text.replace("[", "\\[")


# --- docs/gpu.md ---------------------------------------------------------------------------------


def markdown(report: Report | None) -> str:
    """The predictions with what was measured of each, and then every row; without a report: the predictions alone."""
    lines = [BEGIN, *_predicted(report), ""]
    if report is not None:
        lines += [*_aims(report), "", *_all(report), ""]
    return "\n".join([*lines, END])


def _predicted(report: Report | None) -> Iterator[str]:
    card = f" ({where(report)})" if report is not None else ""
    yield f"| | predicted | arithmetic | measured{card} |"
    yield "| --- | --- | --- | --- |"
    for one in predictions():
        yield _row(one.what, one.predicted, one.why, _measured(one, report))


def _measured(prediction: Prediction, report: Report | None) -> str:
    row = report.row(prediction.key) if report is not None else None
    if row is None:
        return "not yet measured"
    share = f", {row.share:.0%} of the limit" if row.share is not None else ""
    return f"{shown(row.figure)} {row.unit}{share}"


def _aims(report: Report) -> Iterator[str]:
    yield "| aim | | |"
    yield "| --- | --- | --- |"
    for aim in aims(report):
        yield _row(aim.what, aim.verdict, aim.found or "-")


def _all(report: Report) -> Iterator[str]:
    yield f"All rows of `{report.command}`, {where(report)}, driver {report.machine.get('driver', 'unknown')}, "
    yield f"torch {report.machine.get('torch', '?')}, Triton {report.machine.get('triton', '?')}:"
    yield ""
    yield "| what | figure | limit | share | note |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for section in report.sections:
        for row in section.rows:
            figure, limit, share = cells(row)[1:4]
            note = row.note if row.ok else f"**wrong** {row.note}"
            yield _row(row.what, figure, limit, share, note)
        if section.status != "done":
            yield _row(f"section {section.name}", section.status, "-", "-", " ".join(section.error[-1:]))


def where(report: Report) -> str:
    return f"{report.machine.get('card', 'unknown card')}, {report.date}"


def _row(*values: str) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"


def put_into(page: str, table: str) -> str:
    """`page` with `table` in the place of its figures. Raises ValueError where it has no place for them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    return head + table + tail
