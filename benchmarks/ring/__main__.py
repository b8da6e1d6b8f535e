"""What a second rank gains and what it costs: `python -m benchmarks.ring --help`.

Prints the time of a sum over two ranks by its size, through shared memory and through gloo; decode and
prefill at one rank and at two, one thread each, and at one rank with two threads, which is what a second
thread brings without a ring; and where each rank's time goes: the part of a step in collectives (in which it
also waits for a rank that has more to compute), and the native kernels' parts.
"""

import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple, get_args

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine.steps import Decode, Prefill
from benchmarks.errors import told_in_a_sentence, write_json
from benchmarks.random_model import LlamaShape, write_llama
from benchmarks.report import machine, versions
from benchmarks.ring.ranks import BenchRing, Share, Timing
from services.executor.core.settings import KvDType
from services.executor.core.step_plan import StepPlan

HIDDEN = 576
ROWS = (1, 16, 64, 512, 2048)
"""Rows of a summed [rows, HIDDEN] tensor: decodes of one sequence and more, chunks of prompts."""
KINDS: dict[str, Decode | Prefill] = {
    "decode, 16 sequences of 320": Decode(16, 320),
    "prefill, 512 tokens": Prefill(512),
}


class Size(NamedTuple):
    """Of a ring."""

    ranks: int
    threads: int
    """Of each rank."""


SIZES = (Size(1, 1), Size(2, 1), Size(1, 2))


class Reduce(msgspec.Struct, frozen=True):
    """A sum of bf16 values over two ranks."""

    backend: str
    rows: int
    microseconds: float
    gigabytes_per_second: float
    """Bytes of one rank's tensor over the time."""


class Scaling(msgspec.Struct, frozen=True):
    """One kind of step at one rank, at two, and at one rank of two threads."""

    step: str
    one: Timing
    two: Timing
    threads: Timing

    @property
    def ratio(self) -> float:
        """What the second rank brings."""
        return self.two.tokens_per_second / self.one.tokens_per_second

    @property
    def ratio_of_threads(self) -> float:
        """What the second thread brings to one rank."""
        return self.threads.tokens_per_second / self.one.tokens_per_second


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


def measure_steps(
    settings: dict[str, object], kinds: dict[str, Decode | Prefill], rounds: int
) -> list[Scaling]:
    """All rings are up at once and take turns, so that what disturbs the machine disturbs all."""
    rings = [BenchRing(settings, *size) for size in SIZES]
    scalings = []
    for name, kind in kinds.items():
        plans = [ring.begin(kind) for ring in rings]
        seconds: list[list[float]] = [[] for _ in rings]
        shares: list[list[list[Share]]] = [[] for _ in rings]
        for _ in range(rounds):
            for at, ring in enumerate(rings):
                taken, share = ring.steps(plans[at], 8)
                seconds[at] += taken
                shares[at].append(share)
        timings = [timing(*found) for found in zip(plans, seconds, shares, strict=True)]
        scalings.append(Scaling(name, *timings))
    for ring in rings:
        ring.close()
    return scalings


def timing(plan: StepPlan, seconds: list[float], shares: list[list[Share]]) -> Timing:
    """Medians over all steps, and over the rounds for each rank's shares."""
    taken = statistics.median(seconds)
    by_rank = [_median(rank) for rank in zip(*shares, strict=True)]
    return Timing(taken * 1e3, len(plan.token_ids) // 4 / taken, by_rank)


def _median(shares: Sequence[Share]) -> Share:
    return Share(
        statistics.median(share.communication for share in shares),
        statistics.median(share.waiting for share in shares),
        {part: statistics.median(share.parts[part] for share in shares) for part in shares[0].parts},
    )


def show(report: RingReport, console: Console) -> None:
    sums = Table("sum over 2 ranks", "rows", "us", "GB/s")
    for reduce in report.reduces:
        sums.add_row(
            reduce.backend,
            f"{reduce.rows} x {HIDDEN} bf16",
            f"{reduce.microseconds:.1f}",
            f"{reduce.gigabytes_per_second:.2f}",
        )
    steps = Table("step", "", "ms", "tok/s", "ratio")
    for rank in range(2):
        steps.add_column(f"rank {rank} in sums (waiting)")
    for scaling in report.scalings:
        shares = [f"{100 * s.communication:.1f}% ({100 * s.waiting:.1f}%)" for s in scaling.two.shares]
        for name, found, ratio, parts in (
            ("1 rank", scaling.one, "", []),
            ("2 ranks", scaling.two, f"{scaling.ratio:.2f}", shares),
            ("1 rank, 2 threads", scaling.threads, f"{scaling.ratio_of_threads:.2f}", []),
        ):
            ms, rate = f"{found.milliseconds:.1f}", f"{found.tokens_per_second:.0f}"
            steps.add_row(scaling.step, name, ms, rate, ratio, *parts)
    for table in (sums, steps, *map(parts_of, report.scalings)):
        if table.row_count:
            console.print(table)
    console.print(f"Machine: {report.machine}. {report.date}. Command: {report.command}", soft_wrap=True)


def parts_of(scaling: Scaling) -> Table:
    """Where the native kernels' time goes; without rows where PyTorch computes."""
    columns = [*scaling.one.shares, *scaling.two.shares, *scaling.threads.shares]
    table = Table(f"{scaling.step}: ms", "1 rank", "rank 0", "rank 1", "2 threads")
    for part in columns[0].parts:
        table.add_row(part, *(f"{column.parts[part]:.2f}" for column in columns))
    return table


def main(
    model: Annotated[
        Path | None, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ] = None,
    random: Annotated[
        str,
        typer.Option(
            help="Instead of a directory: a random Llama of this shape, as "
            "hidden,heads,kv_heads,inner,layers,vocabulary."
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Of full KV blocks: auto, bf16, int8 or fp8.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Times that the rings take turns, 8 steps each.", min=1)] = 5,
    sums: Annotated[int, typer.Option(help="Sums to take the median of; 0: leave them out.", min=0)] = 300,
    steps: Annotated[bool, typer.Option(help="Measure decode and prefill.")] = True,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """The time of a sum over two ranks, and decode and prefill at one rank and at two."""
    if kv_dtype not in get_args(KvDType):
        raise typer.BadParameter(f"--kv-dtype {kv_dtype} is not one of {', '.join(get_args(KvDType))}.")
    if (model is None) != bool(random):
        raise typer.BadParameter("Name a model directory, or a shape with --random, and not both.")
    settings: dict[str, object] = {"dtype": dtype, "device": "cpu", "kv_dtype": kv_dtype}
    with TemporaryDirectory(prefix="ryzanstein-bench-") as scratch:
        settings["model"] = str((model or _random_model(Path(scratch), random)).resolve())
        report = RingReport(
            date=datetime.now(UTC).date().isoformat(),
            command=" ".join(["python -m benchmarks.ring", *sys.argv[1:]]),
            machine=machine(),
            versions=versions(),
            reduces=measure_reduces(("shm", "gloo"), sums) if sums else [],
            scalings=measure_steps(settings, KINDS, rounds) if steps else [],
        )
    show(report, Console())
    with told_in_a_sentence():
        write_json(json, report)


def _random_model(directory: Path, text: str) -> Path:
    try:
        shape = LlamaShape.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"--random {error}.") from None
    write_llama(directory, shape)
    return directory


if __name__ == "__main__":
    typer.run(main)
