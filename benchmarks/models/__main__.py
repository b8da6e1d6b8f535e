"""Two models and room for one: what a switch costs, and what a load on both does. `python -m benchmarks.models --help`.

Each system gets the same schedules, one after the other on the same machine, and starts with its caches warm: every
model has been loaded once. Times count from the moment at which a client wants to ask.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Report, Seed, Sheet, about, publish, run
from benchmarks.models.switching import Figures, System, alternating, mixed, play
from benchmarks.models.systems import Served, llama_cpp, ollamas_order, ryzanstein, scratch

SLOTS = 8


class SwitchingReport(Report, frozen=True, kw_only=True):
    results: list[Figures]


class Schedules(msgspec.Struct, frozen=True):
    switches: int
    requests: int
    rate: float
    change: float
    tokens: int
    seed: int


async def measure(system: System, schedules: Schedules, models: int) -> list[Figures]:
    one, seed = schedules, schedules.seed
    return [
        await play(system, "alternating", alternating(one.switches, models, seed), one.tokens),
        await play(system, "mixed", mixed(one.requests, models, one.rate, one.change, seed), one.tokens),
    ]


async def _measured(
    made: AbstractAsyncContextManager[System], schedules: Schedules, models: int
) -> list[Figures]:
    async with made as system:
        return await measure(system, schedules, models)


def parse_model(text: str) -> Served:
    """NAME=FILE.gguf. Raises `BenchError`."""
    name, _, file = text.partition("=")
    path = Path(file).expanduser()
    if not name or not path.is_file() or path.suffix != ".gguf":
        raise BenchError(f"{text!r} is not NAME=FILE with a GGUF file that is there.")
    return Served(name, path.resolve())


def parts(results: Sequence[Figures]) -> list[Sheet | str]:
    rows = []
    for one in results:
        times = (one.first_token_p50, one.first_token_p99, one.tokens_per_second, one.seconds)
        rows.append((one.system, one.schedule, one.requests, one.failed, *(f"{time:.2f}" for time in times)))
    head = (
        *("system", "schedule", "requests", "failed", "first token p50 s", "p99 s"),
        *("output tok/s", "whole s"),
    )
    said = [f"{one.system}, {one.schedule}: {error}" for one in results for error in one.errors]
    return [Sheet(head, rows, left=("schedule",)), *said]


def main(
    model: Annotated[list[str], typer.Option(help="NAME=FILE.gguf, twice or more.")],
    host_memory: Annotated[
        int, typer.Option(help="Bytes for ryzanstein's models: enough for one, and for no two.", min=1)
    ],
    llama_server: Annotated[
        Path | None, typer.Option(help="llama.cpp's llama-server; without it ryzanstein is measured alone.")
    ] = None,
    switches: Annotated[int, typer.Option(help="Requests of the alternating schedule.", min=2)] = 20,
    requests: Annotated[int, typer.Option(help="Requests of the mixed schedule.", min=1)] = 60,
    rate: Annotated[float, typer.Option(help="Its requests per second.", min=0.01)] = 1.0,
    change: Annotated[
        float, typer.Option(help="Probability that the next request is for another model.", min=0, max=1)
    ] = 0.3,
    tokens: Annotated[int, typer.Option(help="Output tokens of each request.", min=1)] = 32,
    seed: Seed = 1,
    json: JsonFile = None,
) -> None:
    """What a switch between models costs, and what a load on several does."""
    with scratch() as directory:
        folder, models = Path(directory), [parse_model(text) for text in model]
        if len(models) < 2:
            raise BenchError("One model never switches: give --model twice or more.")
        schedules = Schedules(switches, requests, rate, change, tokens, seed)
        systems = [ryzanstein(models, host_memory, folder)]
        if llama_server is not None:
            options = ("--parallel", str(SLOTS), "--no-webui")
            systems.append(llama_cpp(llama_server, models, options, folder))
            systems.append(ollamas_order(llama_server, models, options, folder))
        results: list[Figures] = []
        for system in systems:
            results += asyncio.run(_measured(system, schedules, len(models)))
        publish(SwitchingReport(**about(), results=results), *parts(results), json=json)


if __name__ == "__main__":
    run(main)
