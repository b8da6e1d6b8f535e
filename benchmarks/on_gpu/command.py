"""The command line of `python -m benchmarks.gpu`."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.errors import BenchError
from benchmarks.harness import command, machine, show, today, versions
from benchmarks.on_gpu import wheels as wheelhouse
from benchmarks.on_gpu.bench import Report, combined, read_report
from benchmarks.on_gpu.device import card, driver
from benchmarks.on_gpu.running import Runner, command_of
from benchmarks.on_gpu.sections import HEADLINE, SECTIONS, Section, chosen
from benchmarks.on_gpu.table import markdown, parts, put_into


def main(
    only: Annotated[str, typer.Option(help="Some of the sections, with commas; see --list.")] = "",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A first look, in some three minutes: is everything right, and how fast is it."),
    ] = False,
    list_sections: Annotated[bool, typer.Option("--list", help="Name the sections, and end.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Where the figures go; else gpu.json in $OUT or here. The log lies beside it."),
    ] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds for everything.", min=10.0)] = 570.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run every section's code on the CPU, with tiny shapes.")
    ] = False,
    markdown_of: Annotated[
        list[Path] | None,
        typer.Option(
            "--markdown", help="Print results files as docs/gpu.md has them, and end; a section is the last one's."
        ),
    ] = None,
    into: Annotated[Path | None, typer.Option(help="With --markdown: the page to put it into.")] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Download what a machine without a network needs, and end.")
    ] = None,
    python: Annotated[str, typer.Option(help="With --wheels: that machine's Python.")] = "3.12",
) -> None:
    """Measure everything that only a GPU can say."""
    if list_sections:
        for section in (*SECTIONS, HEADLINE):
            print(f"{section.name:13} {section.title} (at most {section.most:.0f} s)")
    elif markdown_of:
        _page(markdown_of, into)
    elif wheels is not None:
        _download(wheels, python)
    else:
        sections = named(only, quick)
        raise typer.Exit(_measure(sections, json_file or default_json(dry_run, quick), budget_s, dry_run))


def named(only: str, quick: bool) -> Sequence[Section]:
    """The sections that were asked for. Raises `BenchError`."""
    try:
        return chosen([name.strip() for name in only.split(",") if name.strip()], quick=quick)
    except KeyError as unknown:
        known = ", ".join(section.name for section in (*SECTIONS, HEADLINE))
        raise BenchError(f"There is no section {', '.join(unknown.args)}; there are {known}.") from None


def default_json(dry_run: bool, quick: bool) -> Path:
    """Where results go that nobody has given a place. Those of a quick run leave those of a whole one alone."""
    name = "gpu" + "-quick" * quick + "-dry-run" * dry_run
    return Path(os.environ.get("OUT") or ".", f"{name}.json")


def about(dry_run: bool) -> dict[str, str]:
    """The machine, in words."""
    found = {"host": machine(), "card": "no GPU: a dry run" if dry_run else card() or ""}
    if not dry_run:
        found["driver"] = driver()
    return found | versions(("torch", "triton", "transformers", "numpy"))


def _measure(sections: Sequence[Section], path: Path, budget_s: float, dry_run: bool) -> int:
    if not dry_run and not card():
        raise BenchError(
            "There is no NVIDIA GPU here (the driver names none); run this on a machine with one, or with --dry-run "
            "to try the code on the CPU."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    report = Report(today(), command(), dry_run, budget_s, about(dry_run), [])
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    say(", ".join(f"{name} {value}" for name, value in report.machine.items()))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that sections go with it
    runner = Runner(report, path, lambda section, rows, limit: command_of(section, rows, limit, report), say)
    try:
        runner.run(sections)
    except KeyboardInterrupt:
        say("interrupted: the sections that follow are not run")
        return 130
    finally:
        show(*parts(report))
        print(f"{path}: all figures, for --markdown {path}; {runner.log}: all that sections have said of errors")
    return verdict(report)


def verdict(report: Report) -> int:
    """The exit code: 1 where something is wrong or did not run."""
    wrong = any(not row.ok for section in report.sections for row in section.rows)
    return int(wrong or any(section.status != "done" for section in report.sections))


def _page(results: Sequence[Path], into: Path | None) -> None:
    try:
        report = combined([read_report(path) for path in results], [section.name for section in (*SECTIONS, HEADLINE)])
        if into is None:
            print(markdown(report))
        else:
            into.write_text(put_into(into.read_text(encoding="utf-8"), report), encoding="utf-8")
    except ValueError as error:
        raise BenchError(f"{error}.") from None


def _download(directory: Path, python: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    size = wheelhouse.download(directory, python)
    print(
        f"{len(list(directory.glob('*.whl')))} wheels, {size / 1e6:.0f} MB, are in {directory}. On the other machine:"
    )
    print(wheelhouse.INSTALL.format(directory=directory))
