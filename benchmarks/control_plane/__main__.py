"""What everything around the engine costs: `python -m benchmarks.control_plane --help`.

Our whole stack on the stub engine, and a load client in C on the same cores that checks every token:

    closed loop   so many requests at once: requests/s, latencies, CPU time of each process per request
    open loop     Poisson arrivals: the 99th percentile at 1,000 requests/s, and the highest rate that keeps the limit
    set speed     steps of known length: what the control plane adds to the first token and to each next one
    idle          nobody asks anything: CPU time and wake-ups of each process in a second

With --dynamo NVIDIA Dynamo's frontend and mock engine take turns with ours in the closed loop. With --against DIR
another checkout of this repository takes turns with this one, in the closed loop and at the set speed; idle they are at
the same time; the ratios are shown. With --profile each process's CPU time is split by function; with --floor the same
stream and the same messages are measured where nothing else is done. With --scaling each kind of process has a core of
its own, and what several of them bring is told by a model of their CPU times.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.control_plane.bench import Bench, Tell, running
from benchmarks.control_plane.comparison import Checkout, Comparison
from benchmarks.control_plane.cpu_profile import Profile, profile
from benchmarks.control_plane.floor import streams as floor
from benchmarks.control_plane.floor.streams import Floor
from benchmarks.control_plane.floor.wake_ups import measure_wake_ups
from benchmarks.control_plane.idle import Idle
from benchmarks.control_plane.load_client import Added, Measured, Outcome, highest, median_run
from benchmarks.control_plane.scaling import Scale, Scaling
from benchmarks.control_plane.systems import Dynamo, Ours, System
from benchmarks.control_plane.systems import dynamo_python as install_dynamo
from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Rounds, about, publish, turns
from benchmarks.harness import run as run_program
from shared.process import freeze_gc_after_startup


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    work: Path
    model: Path | None = None
    tokens: int = 16
    connections: int = 64
    seconds: float = 5.0
    rounds: int = 3
    limit_ms: float = 50.0
    step_ms: float = 20.0
    dynamo: bool = False
    dynamo_base: str = ""
    gateways: int = 1
    schedulers: int = 1
    idle_seconds: float = 5.0

    def bench(self, folder: Path, tell: Tell) -> Bench:
        return Bench(folder, self.tokens, self.connections, self.seconds, tell)


async def run(plan: Plan, folder: Path, tell: Tell) -> Outcome:
    bench = plan.bench(folder, tell)
    ours = Ours(folder / "stack", model=plan.model)
    systems: list[System] = [ours]
    left_out: dict[str, str] = {}
    if plan.gateways > 1 or plan.schedulers > 1:
        many = {"gateways": plan.gateways, "schedulers": plan.schedulers}
        systems.append(Ours(folder / "stack-several", model=plan.model, **many))
    if plan.dynamo:
        try:
            systems.append(_dynamo(plan, folder, tell))
        except BenchError as error:
            left_out["dynamo"] = str(error)
    idle = None
    async with running(systems, tell):
        if plan.idle_seconds:
            ((idle, *_),) = await bench.idle(systems, plan.idle_seconds)
        for system in systems:
            await bench.warm_up(system)
        closed = await bench.closed(systems, plan.rounds)
    tried: list[Measured] = []
    at_mark = None
    if plan.limit_ms:
        again = Ours(folder / "stack-open", model=plan.model)
        async with running([again], tell):
            await bench.warm_up(again)
            at_mark = await bench.at_mark(again, plan.limit_ms)
            start = 0.8 * median_run(closed[ours.name]).figures.requests_per_second
            tried = await bench.search(again, start, plan.limit_ms)
    added = None
    if plan.step_ms:
        slow = Ours(folder / "stack-slow", model=plan.model, step_ms=plan.step_ms)
        async with running([slow], tell):
            added = await bench.added(slow, plan.step_ms, plan.connections)
    return Outcome(
        **about(),
        limit_ms=plan.limit_ms,
        tokens=plan.tokens,
        connections=plan.connections,
        closed=closed,
        searched=tried,
        highest=highest(tried, plan.limit_ms),
        at_mark=at_mark,
        added=added,
        idle=idle,
        left_out=left_out,
    )


async def run_against(plan: Plan, there: Path, folder: Path, tell: Tell) -> Comparison:
    """Rounds of both workloads, this checkout and the one in `there` in turns."""
    here = Path(__file__).parents[2]
    bench = plan.bench(folder, tell)
    roots = {"here": here, "there": there}

    def both(step_ms: float) -> list[Checkout]:
        return [
            Checkout(name, root, folder / f"{name}-{step_ms:g}", model=plan.model, step_ms=step_ms)
            for name, root in roots.items()
        ]

    systems = both(0.0)
    idle: list[list[Idle]] = []
    async with running(systems, tell):
        if plan.idle_seconds:
            idle = await bench.idle(systems, plan.idle_seconds, plan.rounds)
        for system in systems:
            await bench.warm_up(system)
        closed = await bench.closed(systems, plan.rounds)
    added: list[tuple[Added, Added]] = []
    if plan.step_ms:
        systems = both(plan.step_ms)
        async with running(systems, tell):
            found: dict[str, list[Added]] = {system.name: [] for system in systems}
            for _, system in turns(systems, plan.rounds):
                found[system.name].append(await bench.added(system, plan.step_ms, plan.connections))
            added = list(zip(found["here"], found["there"], strict=True))
    return Comparison(
        **about(),
        here=str(here),
        there=str(there),
        tokens=plan.tokens,
        connections=plan.connections,
        closed=list(zip(closed["here"], closed["there"], strict=True)),
        added=added,
        idle=[(one, other) for one, other in idle],
    )


async def run_profile(plan: Plan, folder: Path, tell: Tell) -> Profile:
    """Where the CPU time goes, under both workloads."""
    bench = plan.bench(folder, tell)
    found = await profile(bench, folder, plan.model, plan.step_ms, plan.connections, plan.seconds, tell)
    return Profile(**about(), workloads=found)


async def run_floor(plan: Plan, folder: Path, tell: Tell) -> Floor:
    """What a stream and a message cost at least."""
    bench = plan.bench(folder, tell)
    freeze_gc_after_startup()  # this process is the sender of messages, which services are too
    return Floor(
        **about(),
        tokens=plan.tokens,
        connections=plan.connections,
        streams=await floor.streams(bench, folder, plan.tokens, plan.rounds, tell),
        messages=await floor.messages(folder, plan.rounds, tell),
        wake_ups=await measure_wake_ups(),
    )


async def run_scaling(plan: Plan, folder: Path, tell: Tell) -> Scaling:
    """What several gateways and schedulers bring."""
    scale = Scale(plan.bench(folder, tell), folder, plan.model, plan.tokens, plan.rounds, tell)
    return await scale.run(plan.connections)


def _dynamo(plan: Plan, folder: Path, tell: Tell) -> Dynamo:
    if plan.model is None:
        raise BenchError("Dynamo needs a model's directory, for its tokenizer; name one with --model.")
    return Dynamo(folder / "dynamo", install_dynamo(plan.work, plan.dynamo_base, tell), plan.model)


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
    rounds: Rounds = 3,
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
    gateways: Annotated[
        int,
        typer.Option(help="A stack with so many on its port takes turns in the closed loop.", min=1, max=64),
    ] = 1,
    schedulers: Annotated[int, typer.Option(help="The same for schedulers.", min=1, max=16)] = 1,
    idle_seconds: Annotated[
        float, typer.Option(help="Length of a measurement with nobody there; 0: not measured.", min=0)
    ] = 5.0,
    against: Annotated[
        Path | None, typer.Option(help="Another checkout's directory, to be compared with this one in turns.")
    ] = None,
    floored: Annotated[
        bool,
        typer.Option("--floor", help="Measure bare servers and bare messages instead, the floor under it."),
    ] = False,
    profiled: Annotated[
        bool, typer.Option("--profile", help="Split each process's CPU time by function; needs py-spy.")
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option(help="Measure processes on cores of their own, and what several of them bring; Linux."),
    ] = False,
    json: JsonFile = None,
) -> None:
    """Requests per second, latencies and CPU time of the control plane.

    Exits with 1 if a response was wrong or a system could not be measured.
    """
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
        gateways=gateways,
        schedulers=schedulers,
        idle_seconds=idle_seconds,
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="control-plane-") as made,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        folder, task = Path(made), progress.add_task("starting")

        def tell(text: str) -> None:
            progress.update(task, description=text)

        found: Floor | Profile | Scaling | Comparison | Outcome
        if floored:
            found = uvloop.run(run_floor(plan, folder, tell))
        elif profiled:
            found = asyncio.run(run_profile(plan, folder, tell))
        elif scaling:
            found = asyncio.run(run_scaling(plan, folder, tell))
        elif against is not None:
            found = asyncio.run(run_against(plan, against.resolve(), folder, tell))
        else:
            found = asyncio.run(run(plan, folder, tell))
    publish(found, *found.parts(), json=json)
    raise typer.Exit(int(not found.clean))


if __name__ == "__main__":
    run_program(main)
