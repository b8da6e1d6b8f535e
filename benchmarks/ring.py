"""What a second rank gains and what it costs: `python -m benchmarks.ring --help`.

Prints the time of a sum over two ranks by its size, through shared memory and through gloo, and decode and
prefill at one rank and at two, one thread each, with the part of a step that each rank spends in collectives
(in which it also waits for a rank that has more to compute).
"""

import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine import decode_plan, prefill_plan
from benchmarks.report import machine, versions
from benchmarks.ring_ranks import BenchRing, Share, Timing
from services.executor.engine.plan import StepPlan

HIDDEN = 576
ROWS = (1, 16, 64, 512, 2048)
"""Rows of a summed [rows, HIDDEN] tensor: decodes of one sequence and more, chunks of prompts."""
WORLDS = (1, 2)


class Reduce(msgspec.Struct, frozen=True):
    """A sum of bf16 values over two ranks."""

    backend: str
    rows: int
    microseconds: float
    gigabytes_per_second: float
    """Bytes of one rank's tensor over the time."""


class Scaling(msgspec.Struct, frozen=True):
    """One kind of step at one rank and at two."""

    step: str
    one: Timing
    two: Timing

    @property
    def ratio(self) -> float:
        return self.two.tokens_per_second / self.one.tokens_per_second


class RingReport(msgspec.Struct, frozen=True):
    date: str
    command: str
    machine: str
    versions: dict[str, str]
    reduces: list[Reduce]
    scalings: list[Scaling]


def measure_reduces(backends: Sequence[str], count: int) -> list[Reduce]:
    found = []
    for backend in backends:
        ring = BenchRing({"collectives": backend}, 2)
        for rows in ROWS:
            seconds = ring.reduce(rows * HIDDEN, count)
            found.append(Reduce(backend, rows, seconds * 1e6, rows * HIDDEN * 2 / seconds / 1e9))
        ring.close()
    return found


def measure_steps(settings: dict[str, object], plans: dict[str, StepPlan], rounds: int) -> list[Scaling]:
    """Both rings are up at once and take turns, so that what disturbs the machine disturbs both."""
    rings = [BenchRing(settings, world) for world in WORLDS]
    scalings = []
    for name, plan in plans.items():
        seconds: list[list[float]] = [[] for _ in WORLDS]
        shares: list[list[list[Share]]] = [[] for _ in WORLDS]
        for _ in range(rounds):
            for at, ring in enumerate(rings):
                taken, share = ring.steps(plan, 8)
                seconds[at] += taken
                shares[at].append(share)
        timings = [timing(plan, *found) for found in zip(seconds, shares, strict=True)]
        scalings.append(Scaling(name, *timings))
    for ring in rings:
        ring.close()
    return scalings


def timing(plan: StepPlan, seconds: list[float], shares: list[list[Share]]) -> Timing:
    """Medians over all steps, and over the rounds for each rank's shares."""
    taken = statistics.median(seconds)
    by_rank = [
        Share(statistics.median(s.communication for s in rank), statistics.median(s.waiting for s in rank))
        for rank in zip(*shares, strict=True)
    ]
    return Timing(taken * 1e3, len(plan.token_ids) // 4 / taken, by_rank)


def show(report: RingReport, console: Console) -> None:
    sums = Table("sum over 2 ranks", "rows", "us", "GB/s")
    for reduce in report.reduces:
        sums.add_row(
            reduce.backend,
            f"{reduce.rows} x {HIDDEN} bf16",
            f"{reduce.microseconds:.1f}",
            f"{reduce.gigabytes_per_second:.2f}",
        )
    steps = Table("step", "1 rank: ms", "tok/s", "2 ranks: ms", "tok/s", "ratio")
    for rank in range(WORLDS[-1]):
        steps.add_column(f"rank {rank} in collectives (waiting)")
    for scaling in report.scalings:
        parts = [f"{100 * s.communication:.1f}% ({100 * s.waiting:.1f}%)" for s in scaling.two.shares]
        steps.add_row(
            scaling.step,
            f"{scaling.one.milliseconds:.1f}",
            f"{scaling.one.tokens_per_second:.0f}",
            f"{scaling.two.milliseconds:.1f}",
            f"{scaling.two.tokens_per_second:.0f}",
            f"{scaling.ratio:.2f}",
            *parts,
        )
    for table in (sums, steps):
        if table.row_count:
            console.print(table)
    console.print(f"Machine: {report.machine}. {report.date}. Command: {report.command}", soft_wrap=True)


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    rounds: Annotated[int, typer.Option(help="Times that the rings take turns, 8 steps each.", min=1)] = 5,
    sums: Annotated[int, typer.Option(help="Sums to take the median of; 0: leave them out.", min=0)] = 300,
    steps: Annotated[bool, typer.Option(help="Measure decode and prefill.")] = True,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """The time of a sum over two ranks, and decode and prefill at one rank and at two."""
    plans = {"decode, 16 sequences of 320": decode_plan(16, 320), "prefill, 512 tokens": prefill_plan(512)}
    settings: dict[str, object] = {"model": str(model.resolve()), "dtype": dtype, "device": "cpu"}
    report = RingReport(
        date=datetime.now(UTC).date().isoformat(),
        command=" ".join(["python -m benchmarks.ring", *sys.argv[1:]]),
        machine=machine(),
        versions=versions(),
        reduces=measure_reduces(("shm", "gloo"), sums) if sums else [],
        scalings=measure_steps(settings, plans, rounds) if steps else [],
    )
    show(report, Console())
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    typer.run(main)
