"""What everything around the engine costs: `python -m benchmarks.control_plane --help`.

Our whole stack on the stub engine, and a load client in C on the same cores that checks every token:

    closed loop   so many requests at once: requests/s, latencies, CPU time of each process per request
    open loop     Poisson arrivals at 1,000 requests/s: the 99th percentile
    set speed     steps of known length: what the control plane adds to the first token and to each next one
    idle          nobody asks anything: CPU time of each process in a second

With --dynamo NVIDIA Dynamo's frontend and mock engine take turns with ours in the closed loop.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.control_plane.bench import Bench, Tell, running
from benchmarks.control_plane.load_client import Outcome
from benchmarks.control_plane.systems import Dynamo, Ours, System
from benchmarks.control_plane.systems import dynamo_python as install_dynamo
from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Rounds, about, publish
from benchmarks.harness import run as run_program


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    work: Path  # where Dynamo's environment is kept
    model: Path | None = None
    tokens: int = 16
    connections: int = 64
    seconds: float = 5.0
    rounds: int = 3
    limit_ms: float = 50.0  # most that p99 may be in the open loop; 0: not measured
    step_ms: float = 20.0  # length of a step for the added latencies; 0: not measured
    dynamo: bool = False
    dynamo_base: str = ""
    idle_seconds: float = 5.0


async def run(plan: Plan, folder: Path, tell: Tell) -> Outcome:
    bench = Bench(folder, plan.tokens, plan.connections, plan.seconds, tell)
    ours = Ours(folder / "stack", model=plan.model)
    systems: list[System] = [ours]
    left_out: dict[str, str] = {}
    if plan.dynamo:
        try:
            systems.append(_dynamo(plan, folder, tell))
        except BenchError as error:
            left_out["dynamo"] = str(error)
    async with running(systems, tell):
        idle = await bench.idle(ours, plan.idle_seconds) if plan.idle_seconds else {}
        for system in systems:
            await bench.warm_up(system)
        closed = await bench.closed(systems, plan.rounds)
    at_mark = added = None
    if plan.limit_ms:
        again = Ours(folder / "stack-open", model=plan.model)
        async with running([again], tell):
            await bench.warm_up(again)
            at_mark = await bench.at_mark(again, plan.limit_ms)
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
        at_mark=at_mark,
        added=added,
        idle_ms=idle,
        left_out=left_out,
    )


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
    dynamo: Annotated[bool, typer.Option(help="Measure NVIDIA Dynamo too; needs --model.")] = False,
    dynamo_python: Annotated[
        str, typer.Option(help="Python that makes its environment; for newer ones its package is incomplete.")
    ] = "python3.10",
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
        dynamo=dynamo,
        dynamo_base=dynamo_python,
        work=user_cache_path("ryzanstein") / "peers",
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="control-plane-") as made,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("starting")
        found = asyncio.run(run(plan, Path(made), lambda text: progress.update(task, description=text)))
    publish(found, *found.parts(), json=json)
    raise typer.Exit(int(not found.clean))


if __name__ == "__main__":
    run_program(main)
