"""What everything around the engine costs: `python -m benchmarks.control_plane --help`.

Our whole stack on the stub engine, and a load client in C on the same cores that checks every token:

    closed loop   so many requests at once: requests/s, latencies, CPU time of each process per request
    open loop     Poisson arrivals: the 99th percentile at 1,000 requests/s, and the highest rate that keeps the limit
    set speed     steps of known length: what the control plane adds to the first token and to each next one

With --dynamo NVIDIA Dynamo's frontend and mock engine take turns with ours in the closed loop. With --against DIR
another checkout of this repository takes turns with this one, in the closed loop and at the set speed, and the ratios
are shown.
"""

import asyncio
import contextlib
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.control_plane.comparison import Checkout, Comparison
from benchmarks.control_plane.comparison import show as show_comparison
from benchmarks.control_plane.load_client import (
    MARK_RATE,
    Added,
    Load,
    Measured,
    Outcome,
    compiled,
    drive,
    faulty,
    highest,
    holds,
    median_run,
    show,
)
from benchmarks.control_plane.systems import HOST, Dynamo, Ours, System
from benchmarks.control_plane.systems import dynamo_python as install_dynamo
from benchmarks.errors import BenchError, told_in_a_sentence, write_json
from benchmarks.process_cpu import cpu_seconds
from benchmarks.report import machine, versions
from benchmarks.serve.stats import Spread

WARM_UP = 1.5
OPEN_CONNECTIONS = 1024
PRECISION = 1.06
"""The search for the highest rate ends when the bounds are this close."""
SEARCH_SECONDS = 3.0
Report = Callable[[str], None]


class Bench:
    """The measurements, one after the other. `report` is told what is going on."""

    def __init__(self, folder: Path, tokens: int, connections: int, seconds: float, report: Report) -> None:
        self._program = compiled(folder)
        self._tokens = tokens
        self._connections = connections
        self._seconds = seconds
        self._report = report
        self._runs = 0

    async def measure(
        self, system: System, *, rate: float = 0.0, seconds: float = 0.0, tokens: int = 0
    ) -> Measured:
        """One run: a closed loop, or an open one at `rate`."""
        self._runs += 1
        tokens = tokens or self._tokens
        load = Load(
            host=HOST,
            port=system.port,
            request=system.request(tokens),
            tokens=tokens,
            text=system.text(tokens),
            connections=OPEN_CONNECTIONS if rate else self._connections,
            rate=rate,
            seconds=seconds or self._seconds,
            seed=self._runs,
        )
        before = cpu_seconds(system.processes())
        figures = await asyncio.to_thread(drive, self._program, load)
        after = cpu_seconds(system.processes())
        right = max(1, figures.requests - sum(figures.faults.values()))
        cpu = {name: (after[name] - before[name]) * 1e3 / right for name in after}
        cpu["client"] = figures.client_cpu_seconds * 1e3 / right
        return Measured(system=system.name, figures=figures, cpu_ms=cpu)

    async def warm_up(self, system: System) -> None:
        self._report(f"{system.name}: warming up")
        await self.measure(system, seconds=WARM_UP)

    async def closed(self, systems: Sequence[System], rounds: int) -> dict[str, list[Measured]]:
        """Systems take turns, every other round backwards, so that what disturbs the machine disturbs all."""
        found: dict[str, list[Measured]] = {system.name: [] for system in systems}
        for at in range(rounds):
            for system in systems[:: -1 if at % 2 else 1]:
                self._report(f"{system.name}: {self._connections} at once, round {at + 1} of {rounds}")
                found[system.name].append(await self.measure(system))
        return found

    async def search(self, system: System, start: float, limit_ms: float) -> list[Measured]:
        """Open loops at rates that close in on the highest one within the limit. A rate has failed when it has
        failed twice: machines have hiccups."""
        low, high, rate = 0.0, 0.0, start
        tried: list[Measured] = []
        while not (low and high and high / low < PRECISION) and rate >= 1:
            self._report(f"{system.name}: open loop at {rate:.0f} requests/s")
            tried.append(await self.measure(system, rate=rate, seconds=SEARCH_SECONDS))
            if not holds(tried[-1], limit_ms):
                tried.append(await self.measure(system, rate=rate, seconds=SEARCH_SECONDS))
            if holds(tried[-1], limit_ms):
                low = rate
            else:
                high = rate
            rate = (low * high) ** 0.5 if low and high else (rate * 1.25 if low else rate / 1.25)
        return tried

    async def at_mark(self, system: System, limit_ms: float) -> Measured:
        """The open loop at the rate of the mark; once more where the first one has not held."""
        self._report(f"{system.name}: open loop at {MARK_RATE:.0f} requests/s")
        found = await self.measure(system, rate=MARK_RATE)
        return found if holds(found, limit_ms) else await self.measure(system, rate=MARK_RATE)

    async def added(self, system: System, step_ms: float, streams: int) -> Added:
        """Poisson arrivals at the rate that keeps `streams` open, each with as many tokens as fill a second."""
        tokens = max(2, round(1000 / step_ms))
        rate = streams / ((tokens + 0.5) * step_ms / 1e3)
        self._report(f"{system.name}: {streams} streams at {step_ms:g} ms a step")
        await self.measure(system, rate=rate, seconds=WARM_UP, tokens=tokens)
        found = await self.measure(system, rate=rate, seconds=max(self._seconds, 4.0), tokens=tokens)
        first, token, whole = found.figures.first_ms, found.figures.token_ms, found.figures.whole_ms
        if not found.figures.clean or first is None or token is None or whole is None:
            raise BenchError(f"The run at a set speed failed: {found.figures.faults}.")
        return Added(
            step_ms=step_ms,
            streams=rate * whole.p50 / 1e3,
            first_token_ms=Spread(first.p50 - 1.5 * step_ms, first.p99 - 1.5 * step_ms),
            token_ms=Spread(token.p50 - step_ms, token.p99 - step_ms),
            cpu_us_per_token={part: cpu * 1e3 / tokens for part, cpu in found.cpu_ms.items()},
        )


@contextlib.asynccontextmanager
async def running(systems: Sequence[System], report: Report) -> AsyncIterator[None]:
    """Starts the systems, and ends them whatever happens."""
    begun: list[System] = []
    try:
        for system in systems:
            report(f"{system.name}: starting")
            begun.append(system)
            await system.start()
        yield
    finally:
        for system in begun:
            await system.stop()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    model: Path | None
    tokens: int
    connections: int
    seconds: float
    rounds: int
    limit_ms: float
    step_ms: float
    dynamo: bool
    dynamo_base: str
    work: Path


async def run(plan: Plan, folder: Path, report: Report) -> Outcome:
    bench = Bench(folder, plan.tokens, plan.connections, plan.seconds, report)
    ours = Ours(folder / "stack", model=plan.model)
    systems: list[System] = [ours]
    left_out: dict[str, str] = {}
    if plan.dynamo:
        try:
            systems.append(_dynamo(plan, folder, report))
        except BenchError as error:
            left_out["dynamo"] = str(error)
    async with running(systems, report):
        for system in systems:
            await bench.warm_up(system)
        closed = await bench.closed(systems, plan.rounds)
    tried: list[Measured] = []
    at_mark = None
    if plan.limit_ms:
        again = Ours(folder / "stack-open", model=plan.model)
        async with running([again], report):
            await bench.warm_up(again)
            at_mark = await bench.at_mark(again, plan.limit_ms)
            start = 0.8 * median_run(closed[ours.name]).figures.requests_per_second
            tried = await bench.search(again, start, plan.limit_ms)
    added = None
    if plan.step_ms:
        slow = Ours(folder / "stack-slow", model=plan.model, step_ms=plan.step_ms)
        async with running([slow], report):
            added = await bench.added(slow, plan.step_ms, plan.connections)
    return Outcome(
        date=datetime.now(UTC).date().isoformat(),
        command=_command(),
        machine=machine(),
        versions=versions(),
        tokens=plan.tokens,
        connections=plan.connections,
        closed=closed,
        searched=tried,
        highest=highest(tried, plan.limit_ms),
        at_mark=at_mark,
        added=added,
        left_out=left_out,
    )


async def run_against(plan: Plan, there: Path, folder: Path, report: Report) -> Comparison:
    """Rounds of both workloads, this checkout and the one in `there` in turns."""
    here = Path(__file__).parents[2]
    bench = Bench(folder, plan.tokens, plan.connections, plan.seconds, report)
    roots = {"here": here, "there": there}

    def both(step_ms: float) -> list[Checkout]:
        return [
            Checkout(name, root, folder / f"{name}-{step_ms:g}", model=plan.model, step_ms=step_ms)
            for name, root in roots.items()
        ]

    systems = both(0.0)
    async with running(systems, report):
        for system in systems:
            await bench.warm_up(system)
        closed = await bench.closed(systems, plan.rounds)
    added: list[tuple[Added, Added]] = []
    if plan.step_ms:
        systems = both(plan.step_ms)
        async with running(systems, report):
            for at in range(plan.rounds):
                found = {
                    system.name: await bench.added(system, plan.step_ms, plan.connections)
                    for system in systems[:: -1 if at % 2 else 1]
                }
                added.append((found["here"], found["there"]))
    return Comparison(
        here=str(here),
        there=str(there),
        date=datetime.now(UTC).date().isoformat(),
        command=_command(),
        machine=machine(),
        tokens=plan.tokens,
        connections=plan.connections,
        closed=list(zip(closed["here"], closed["there"], strict=True)),
        added=added,
    )


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks.control_plane", *sys.argv[1:]])


def _dynamo(plan: Plan, folder: Path, report: Report) -> Dynamo:
    if plan.model is None:
        raise BenchError("Dynamo needs a model's directory, for its tokenizer; name one with --model.")
    return Dynamo(folder / "dynamo", install_dynamo(plan.work, plan.dynamo_base, report), plan.model)


def main(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A model's directory: text goes through its tokenizer and chat template. Else a token is a byte."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Output tokens of a request.", min=2)] = 16,
    connections: Annotated[int, typer.Option(help="Requests at once in the closed loop.", min=1)] = 64,
    seconds: Annotated[float, typer.Option(help="Length of a run.", min=0.5)] = 5.0,
    rounds: Annotated[int, typer.Option(help="Rounds of the closed loop; the median counts.", min=1)] = 3,
    limit_ms: Annotated[
        float,
        typer.Option(help="Most that the 99th percentile may be in the open loop; 0: no search.", min=0),
    ] = 50.0,
    step_ms: Annotated[
        float, typer.Option(help="Length of a step for the added latencies; 0: not measured.", min=0)
    ] = 20.0,
    dynamo: Annotated[bool, typer.Option(help="Measure NVIDIA Dynamo too; needs --model.")] = False,
    dynamo_python: Annotated[
        str, typer.Option(help="Python that makes its environment; for newer ones its package is incomplete.")
    ] = "python3.10",
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Where Dynamo's environment is kept. Default: in the user's cache directory."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkout's directory, to be compared with this one in turns.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything, each run too, to this file.")] = None,
) -> None:
    """Requests per second, latencies and CPU time of the control plane.

    Exits with 1 if a response was wrong or a system could not be measured.
    """
    console = Console() if Console().is_terminal else Console(width=200)
    plan = Plan(
        model=model,
        tokens=tokens,
        connections=connections,
        seconds=seconds,
        rounds=rounds,
        limit_ms=limit_ms,
        step_ms=step_ms,
        dynamo=dynamo,
        dynamo_base=dynamo_python,
        work=(work_dir or user_cache_path("ryzanstein") / "peers").expanduser().resolve(),
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with told_in_a_sentence():
        with (
            tempfile.TemporaryDirectory(prefix="control-plane-") as made,
            Progress(*columns, console=Console(stderr=True)) as progress,
        ):
            folder, task = Path(made), progress.add_task("starting")

            def report(text: str) -> None:
                progress.update(task, description=text)

            if against is not None:
                comparison = asyncio.run(run_against(plan, against.resolve(), folder, report))
            else:
                outcome = asyncio.run(run(plan, folder, report))
        write_json(json, outcome if against is None else comparison)
    if against is not None:
        show_comparison(comparison, console)
        raise typer.Exit(int(not comparison.clean))
    show(outcome, limit_ms, console)
    raise typer.Exit(int(faulty(outcome)))


if __name__ == "__main__":
    typer.run(main)
