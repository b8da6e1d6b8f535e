"""The command line. Exit status: 0, or 1 where a promise is broken, or 2 where what was asked for cannot be run."""

import argparse
import operator
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.simulation.bugs.table import BUGS
from tests.simulation.faults.kinds import KINDS
from tests.simulation.faults.schedule import Schedule, Unusable, load, save
from tests.simulation.scenarios import scenario as scenarios
from tests.simulation.scenarios.drawing import draw
from tests.simulation.scenarios.scenario import Scenario
from tests.simulation.search import coverage
from tests.simulation.search.reduction import Reduction
from tests.simulation.search.runner import Worker
from tests.simulation.search.seeds import MOST_JOBS, one, outcomes
from tests.simulation.systems.outcome import Outcome

FOUND = Path(__file__).parents[1] / "found"
console = Console(highlight=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.act(options))
    except Unusable as error:
        console.print(f"error: {error}", markup=False, style="red")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulates the control plane.")
    acts = parser.add_subparsers(required=True, metavar="COMMAND")

    run = acts.add_parser("run", help="one seed, or one schedule")
    _of_one(run)
    run.add_argument("--story", action="store_true", help="tell what happened")
    run.set_defaults(act=_run)

    search = acts.add_parser("search", help="many seeds")
    search.add_argument(
        "--scenario", action="append", help="a name or a file (default: everything); may be given several times"
    )
    search.add_argument("--bug", action="append", default=[], metavar="NAME", help="put a mended bug back")
    search.add_argument("--seeds", type=_from(1), default=100, metavar="N", help="how many (default: 100)")
    search.add_argument("--first", type=_from(0), default=1, metavar="SEED", help="the first of them (default: 1)")
    search.add_argument("--jobs", type=_from(1, MOST_JOBS), default=1, metavar="N", help="runs at a time (default: 1)")
    search.add_argument("--minutes", type=float, default=0.0, metavar="M", help="begin no run after so many")
    search.add_argument("--timeout", type=float, default=600.0, metavar="S", help="real seconds of a run")
    search.add_argument("--failures", type=_from(1), default=10, metavar="N", help="end after so many (default: 10)")
    search.add_argument("--coverage", action="store_true", help="print which transitions of states were seen")
    search.set_defaults(act=_search)

    reduce = acts.add_parser("reduce", help="make a seed or schedule that fails as short as it can be made")
    _of_one(reduce)
    reduce.add_argument("--runs", type=_from(1), default=300, metavar="N", help="at most (default: 300)")
    reduce.add_argument("--out", type=Path, metavar="FILE", help="where it is written (default: found/)")
    reduce.set_defaults(act=_reduce)

    acts.add_parser("list", help="scenarios, faults, and bugs that can be put back").set_defaults(act=_list)
    return parser


def _of_one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", default="everything", help="a name or a file (default: everything)")
    parser.add_argument("--seed", type=_from(0), default=1, metavar="N")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="instead of what is drawn from the seed")
    parser.add_argument("--bug", action="append", default=[], metavar="NAME", help="put a mended bug back")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="real seconds of a run")


def _from(least: int, most: int = 2**63) -> "type[int]":
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number  # type: ignore[return-value]


# --- commands --------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    scenario, schedule = _chosen(options)
    with Worker(options.timeout) as worker, tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "story") if options.story else None
        outcome = one(worker, scenario, schedule, str(told or ""))
        if told is not None and told.exists():
            console.print(told.read_text(), markup=False)
    _report(outcome)
    return int(outcome.fails)


def _search(options: argparse.Namespace) -> int:
    names = options.scenario or ["everything"]
    found = [scenarios.load(name) for name in names]
    totals, seen = [], coverage.Coverage()
    for name, scenario in zip(names, found, strict=True):
        totals.append(_search_one(options, name, scenario, seen))
        console.print(f"{scenario.name}: {totals[-1]}", markup=False)
    if len(totals) > 1:
        console.print(f"all: {sum(totals, _Totals())}", markup=False)
    if options.coverage:
        for table in seen.tables():
            console.print(table)
    return int(any(one.failed for one in totals))


def _search_one(options: argparse.Namespace, name: str, scenario: Scenario, seen: coverage.Coverage) -> "_Totals":
    bugs, totals = _bugs(options.bug), _Totals()
    seeds = range(options.first, options.first + options.seeds)
    with _progress() as progress:
        task = progress.add_task(scenario.name, total=len(seeds))
        for outcome in outcomes(
            scenario,
            seeds,
            jobs=options.jobs,
            minutes=options.minutes,
            timeout=options.timeout,
            change=lambda schedule: msgspec.structs.replace(schedule, bugs=bugs),
        ):
            totals += _Totals.of(outcome)
            seen.add(outcome.seen)
            progress.update(task, advance=1, description=f"{scenario.name}: {totals.failed} failed")
            if outcome.fails:
                _report_failure(name, outcome)
                if totals.failed >= options.failures:
                    break
    return totals


def _reduce(options: argparse.Namespace) -> int:
    scenario, schedule = _chosen(options)
    with Worker(options.timeout) as worker, _progress() as progress, tempfile.TemporaryDirectory() as folder:
        first = one(worker, scenario, schedule)
        if not first.fails:
            console.print("It breaks no promise: there is nothing to reduce.")
            return 0
        promise = first.broken[0].promise
        task = progress.add_task(promise, total=options.runs)

        def fails(candidate: Schedule) -> bool:
            progress.advance(task)
            broken = one(worker, scenario, candidate).broken
            return any(one.promise == promise for one in broken)

        short = Reduction(fails, options.runs).reduce(schedule)
        story = Path(folder, "story")
        outcome = one(worker, scenario, short, str(story))
        told = next(broken.told for broken in outcome.broken if broken.promise == promise)
        if story.exists():
            console.print(story.read_text(), markup=False)
    _report(outcome)
    path = options.out or FOUND / f"{scenario.name}-{schedule.seed}.yaml"
    save(msgspec.structs.replace(short, breaks=promise, told=told.partition("\n")[0]), path)
    console.print(f"Written to {path}: python -m tests.simulation run --schedule {path} --story", markup=False)
    return 1


def _list(options: argparse.Namespace) -> int:
    for title, rows in (
        ("Scenario", [(name, scenarios.load(name).about) for name in scenarios.names()]),
        ("Fault", [(kind.name, kind.story) for kind in KINDS.values()]),
        ("Bug that can be put back", [(bug.name, bug.about) for bug in BUGS.values()]),
    ):
        table = Table(title, "")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return 0


# --- what was chosen, and what is said ---------------------------------------------------------------------


def _bugs(names: list[str]) -> list[str]:
    for name in names:
        if name not in BUGS:
            raise Unusable(f"There is no bug {name!r} to put back; known are {', '.join(sorted(BUGS))}.")
    return names


def _chosen(options: argparse.Namespace) -> tuple[Scenario, Schedule]:
    if options.schedule is not None:
        schedule = load(options.schedule)
        scenario = scenarios.load(schedule.scenario)
        scenarios.check_schedule(scenario, schedule)
    else:
        scenario = scenarios.load(options.scenario)
        schedule = draw(scenario, options.seed)
    if options.bug:
        schedule = msgspec.structs.replace(schedule, bugs=options.bug)
    _bugs(schedule.bugs)
    return scenario, schedule


def _report(outcome: Outcome) -> None:
    for broken in outcome.broken:
        console.print(f"BROKEN {broken.promise}: {broken.told}", markup=False, style="red")
    console.print(
        f"{len(outcome.schedule.faults)} faults, {outcome.requests} requests, {outcome.simulated:.1f} s simulated in"
        f" {outcome.seconds:.2f} s: {_hours(outcome.simulated, outcome.seconds)}; digest {outcome.digest[:16]}",
        markup=False,
    )


def _report_failure(scenario: str, outcome: Outcome) -> None:
    seed, bugs = outcome.schedule.seed, "".join(f" --bug {bug}" for bug in outcome.schedule.bugs)
    for broken in outcome.broken[:3]:
        console.print(f"BROKEN by seed {seed}: {broken.promise}: {broken.told}", markup=False, style="red")
    console.print(
        f"  python -m tests.simulation run --scenario {scenario} --seed {seed}{bugs} --story\n"
        f"  python -m tests.simulation reduce --scenario {scenario} --seed {seed}{bugs}",
        markup=False,
    )


@dataclass
class _Totals:
    runs: int = 0
    failed: int = 0
    faults: int = 0
    requests: int = 0
    simulated: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, outcome: Outcome) -> "_Totals":
        faults = sum(outcome.faults.values())
        return cls(1, int(outcome.fails), faults, outcome.requests, outcome.simulated, outcome.seconds)

    def __add__(self, other: "_Totals") -> "_Totals":
        return _Totals(*map(operator.add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.failed} failed; {self.faults} faults, {self.requests} requests;"
            f" {self.simulated / 3600:.2f} hours simulated in {self.seconds:.0f} s of a core:"
            f" {_hours(self.simulated, self.seconds)}"
        )


def _hours(simulated: float, seconds: float) -> str:
    return f"{simulated / seconds:.0f} simulated hours an hour of one core" if seconds else "no time measured"


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
