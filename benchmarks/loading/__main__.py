"""How fast ranks load a model from the page cache, and what memory it takes: `python -m benchmarks.loading`.

Without a directory it writes a random Llama into a temporary one. Every rank is a process of its own, and
the ranks of a ring load at the same time, with the processor's cores shared out between them.

    copy      torch's copy of as many bytes as the rank's share, end to end, from files freshly mapped and in
              the page cache to memory nobody has touched, in huge pages and in small ones: what a loader
              has to do at the least, page faults included. The better of the two is the measure.
    read      the loader's copying, from the first report of its progress to the last: slices, file by file
    load      all of `load_model`: configuration, empty model, files, copying, packing of the weights
    memory    peak of anonymous memory (RssAnon, sampled) and of all resident memory (VmHWM, the kernel's)
              over what was there before, while reading and in all, as parts of the rank's share
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import machine
from benchmarks.loading.rank import write_random


@dataclass(frozen=True)
class Figures:
    """What one ring size measured; rates in bytes per second, over all ranks."""

    share: int
    """Bytes of the largest share."""
    copy: dict[str, float]
    read: float
    load_seconds: float
    memory: dict[str, float]
    """The rank's peak over its share, the worst rank's."""

    @property
    def part(self) -> float:
        """The loader's rate over the measured bandwidth of a copy."""
        return self.read / max(self.copy.values())


class Rank:
    """A rank's process, which does one thing for each line it is sent."""

    def __init__(self, directory: Path, rank: int, world_size: int, threads: int, dtype: str):
        command = [sys.executable, "-m", "benchmarks.loading.rank", str(directory)]
        command += [str(rank), str(world_size), str(threads), dtype]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answer()

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("A rank of the benchmark ended; its error is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


def all_do(ranks: list[Rank], what: str) -> list[dict[str, Any]]:
    """Every rank does `what` at the same time; their answers."""
    for rank in ranks:
        rank.ask(what)
    return [rank.answer() for rank in ranks]


def rate(answers: list[dict[str, Any]]) -> float:
    """Bytes per second of ranks that worked side by side: from the first that began to the last that ended."""
    span = max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)
    return float(sum(answer["bytes"] for answer in answers) / span)


def measure(directory: Path, world_size: int, threads: int, dtype: str, rounds: int) -> Figures:
    """Best of `rounds` for the times; memory is measured in a load of its own."""
    ranks = [Rank(directory, rank, world_size, threads, dtype) for rank in range(world_size)]
    try:
        copies: dict[str, list[float]] = {"huge": [], "small": []}
        loads = []
        for _ in range(rounds):
            for pages, rates in copies.items():
                rates.append(rate(all_do(ranks, f"copy-{pages}")))
            loads.append(all_do(ranks, "load"))
        peaks = all_do(ranks, "memory")
    finally:
        for rank in ranks:
            rank.close()
    return Figures(
        share=max(answer["bytes"] for answer in peaks),
        copy={pages: max(rates) for pages, rates in copies.items()},
        read=max(rate(answers) for answers in loads),
        load_seconds=min(max(answer["seconds"] for answer in answers) for answers in loads),
        memory={
            kind: max(answer[kind] / answer["bytes"] for answer in peaks)
            for kind in ("read_anonymous", "read_resident", "anonymous", "resident")
        },
    )


def print_figures(figures: dict[str, Figures], dtype: str) -> None:
    table = Table("", *figures)

    def row(name: str, form: str, values: list[float]) -> None:
        table.add_row(name, *(form.format(value) for value in values))

    found = list(figures.values())
    row("share of a rank, GB", "{:.2f}", [one.share / 1e9 for one in found])
    row("copy to fresh huge pages, GB/s", "{:.2f}", [one.copy["huge"] / 1e9 for one in found])
    row("copy to fresh small pages, GB/s", "{:.2f}", [one.copy["small"] / 1e9 for one in found])
    row("loader, reading, GB/s", "{:.2f}", [one.read / 1e9 for one in found])
    row("loader over the better copy", "{:.0%}", [one.part for one in found])
    row("load_model in all, s", "{:.2f}", [one.load_seconds for one in found])
    row("peak anonymous over share, reading", "{:.3f}", [one.memory["read_anonymous"] for one in found])
    row("peak resident over share, reading", "{:.3f}", [one.memory["read_resident"] for one in found])
    row("peak anonymous over share, in all", "{:.3f}", [one.memory["anonymous"] for one in found])
    row("peak resident over share, in all", "{:.3f}", [one.memory["resident"] for one in found])
    console = Console()
    console.print(f"{machine()}; served in {dtype}")
    console.print(table)


def main(
    directory: Annotated[
        Path | None, typer.Argument(help="A model directory; without one a random Llama is written.")
    ] = None,
    gigabytes: Annotated[float, typer.Option(help="Size of the random model.", min=0.1)] = 1.5,
    ranks: Annotated[str, typer.Option(help="Ring sizes, with commas between them.")] = "1,2",
    dtype: Annotated[str, typer.Option(help="What the ranks serve: bf16 or fp32.")] = "bf16",
    rounds: Annotated[int, typer.Option(help="The best of so many counts.", min=1)] = 5,
) -> None:
    """Loading from the page cache: rate against the machine's copy bandwidth, and peak memory."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-loading-") as scratch:
        if directory is None:
            directory = Path(scratch)
            write_random(directory, int(gigabytes * 1e9))
        cores = len(os.sched_getaffinity(0))
        figures = {}
        for size in (int(text) for text in ranks.split(",")):
            threads = max(1, cores // size)
            name = f"{size} rank{'s' * (size > 1)} of {threads} thread{'s' * (threads > 1)}"
            figures[name] = measure(directory, size, threads, dtype, rounds)
        print_figures(figures, dtype)


if __name__ == "__main__":
    typer.run(main)
