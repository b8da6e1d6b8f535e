"""How everything here is measured and told: variants in turns, medians, tables, a saved JSON. Sections say what.

variants ──▶ in_turns, round by round ──▶ medians ──▶ publish: tables, where and how it was made, JSON if wanted
"""

import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.errors import told_in_a_sentence, write_json

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PIPED_WIDTH = 200  # columns where there is no terminal to fit a table to: no cell is folded
_PACKAGES = ("ryzanstein", "uvloop", "httptools", "torch", "transformers")

T = TypeVar("T")
K = TypeVar("K")

# --- options that commands share -----------------------------------------------------------------

ModelDirectory = Annotated[Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")]
Threads = Annotated[int, typer.Option(help="CPU threads.", min=1)]
Rounds = Annotated[int, typer.Option(help="Rounds, in each of which the variants take turns.", min=1)]
Dtype = Annotated[str, typer.Option(help="bf16 or fp32.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


def program(main: Callable[..., None]) -> typer.Typer:
    """`main` as a command; what stops it is told in a sentence."""

    @wraps(main)
    def told(*arguments: Any, **options: Any) -> None:
        with told_in_a_sentence():
            main(*arguments, **options)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(told)
    return app


def run(main: Callable[..., None]) -> None:
    program(main)()


def one_of(name: str, wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """`wanted`, where all are known. Raises typer.BadParameter."""
    found, choices = list(wanted), list(known)
    if unknown := [each for each in found if each not in choices]:
        raise typer.BadParameter(f"{name}: {unknown[0]!r} is not one of {', '.join(choices)}.")
    return found


# --- rounds --------------------------------------------------------------------------------------


def turns(names: Iterable[K], rounds: int) -> Iterator[tuple[int, K]]:
    """(round, name): all in each round, each time another one first (A B, B A; A B C, B C A, C A B), so that what
    disturbs the machine disturbs all, and with more than two none follows itself, whose caches would be warm."""
    order = list(names)
    for at in range(rounds):
        first = at % max(1, len(order))
        yield from ((at, name) for name in order[first:] + order[:first])


def in_turns(work: Mapping[K, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[K, list[T]]:
    """What each gives in every round; those of the warm-up before do not count."""
    found: dict[K, list[T]] = {name: [] for name in work}
    for at, name in turns(work, warm_up + rounds):
        value = work[name]()
        if at >= warm_up:
            found[name].append(value)
    return found


def timed(work: Callable[[], object], times: int = 1) -> Callable[[], float]:
    """Seconds of `work`, done so many times."""

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - began

    return seconds


def milliseconds(work: Callable[[], object], rounds: int, warm_up: int = 3) -> float:
    """Median of one call."""
    return statistics.median(in_turns({"": timed(work)}, rounds, warm_up)[""]) * 1e3


def nearest(values: Iterable[float], share: float, weights: Sequence[float] | None = None) -> float:
    """Percentile by nearest rank, as everywhere here; 0 where there is no value."""
    from benchmarks.serve.stats import percentile

    found = list(values)
    return percentile(found, share, weights) if found else 0.0


def median(runs: Sequence[Any]) -> Any:
    """One of several like each other: numbers become their median, structs, dicts and lists field by field; what else
    there is (names) is the first one's. None counts nowhere."""
    known = [one for one in runs if one is not None]
    first = known[0] if known else None
    if isinstance(first, bool) or not known:
        return first
    if isinstance(first, int | float):
        return statistics.median(known)
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return type(first)(**{name: median([getattr(one, name) for one in known]) for name in names})
    if isinstance(first, Mapping):
        return {key: median([one[key] for one in known if key in one]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(median(each) for each in zip(*known, strict=False))
    return first


# --- reports -------------------------------------------------------------------------------------


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Where, when and how figures were made; reports add what they have found."""

    date: str
    command: str
    machine: str
    versions: dict[str, str] = {}

    def line(self) -> str:
        return f"Machine: {self.machine}. {self.date}. Command: {self.command}"


def about() -> dict[str, Any]:
    """The fields of a `Report`, of this run."""
    return {"date": today(), "command": command(), "machine": machine(), "versions": versions()}


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def command() -> str:
    """How this program was started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def machine() -> str:
    """CPU model, usable cores and memory of this machine, in one line."""
    parts = [_proc("cpuinfo", "model name") or platform.processor() or platform.machine(), f"{CORES} cores"]
    if total := _proc("meminfo", "MemTotal"):
        parts.append(f"{int(total.split()[0]) / 2**20:.0f} GiB")
    return ", ".join([*parts, f"{platform.system()} {platform.release().split('-')[0]}"])


def _proc(file: str, key: str) -> str | None:
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Of Python and the packages that matter, as installed where this runs."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Sheet:
    """A table, for a terminal and for the documentation."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    left: Sequence[str] = ()  # columns beside the first one whose cells are words
    styles: Sequence[str | None] = ()  # of the rows, on a terminal

    def table(self) -> Table:
        made = Table(title=self.title or None, box=box.SIMPLE_HEAD, pad_edge=False)
        for at, name in enumerate(self.head):
            made.add_column(name, justify="left" if at == 0 or name in self.left else "right", overflow="fold")
        for at, row in enumerate(self.rows):
            made.add_row(*(escape(str(cell)) for cell in row), style=self.styles[at] if self.styles else None)
        return made

    def markdown(self) -> str:
        rule = ["---" if at == 0 or name in self.left else "---:" for at, name in enumerate(self.head)]
        return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (self.head, rule, *self.rows)) + "\n"


def progress_bars() -> Progress:
    """Bars on the terminal only, drawn rarely: drawing costs the server CPU time."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=2)


def screen() -> Console:
    """Standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def show(*parts: Sheet | Table | str, console: Console | None = None) -> None:
    """Prints tables, and sentences as they are; tables without rows are left out."""
    console = console or screen()
    for part in parts:
        made = part.table() if isinstance(part, Sheet) else part
        if isinstance(made, str):
            console.print(made, markup=False, emoji=False, highlight=False, soft_wrap=True)
        elif made.row_count:
            console.print(made)


def publish(report: Any, *parts: Sheet | Table | str, json: Path | None = None, console: Console | None = None) -> None:
    """Prints the parts, and beneath where a `Report` was made; writes all of it where a file is wanted. Raises
    `BenchError`."""
    show(*parts, *([report.line()] if isinstance(report, Report) else []), console=console)
    write_json(json, report)
