"""How fast ranks load a model from the page cache: `python -m benchmarks.loading`.

Without a directory it writes a random Llama into a temporary one. Every rank is a process of its own, and
the ranks of a ring load at the same time, with the processor's cores shared out between them.

    copy      torch's copy of as many bytes as the rank's share, end to end, from files freshly mapped and in
              the page cache to memory nobody has touched, in huge pages and in small ones: what a loader
              has to do at the least, page faults included. The better of the two is the measure.
    read      the loader's copying, from the first report of its progress to the last: slices, file by file
    load      all of `load_model`: configuration, empty model, files, copying, packing of the weights
"""

import contextlib
import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import CORES, Rounds, Sheet, machine, run, show
from benchmarks.loading.rank import serve, write_random


@dataclass(frozen=True)
class Figures:
    """What one ring size measured; rates in bytes per second, over all ranks."""

    share: int  # bytes of the largest share
    copy: dict[str, float]
    read: float
    load_seconds: float

    @property
    def part(self) -> float:
        """The loader's rate over the measured bandwidth of a copy."""
        return self.read / max(self.copy.values())


class Ranks:
    """Processes of a ring; each does one thing for each word that it is sent."""

    def __init__(self, directory: Path, world_size: int, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, directory, rank, world_size, threads)
            self._processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def all_do(self, what: str) -> list[dict[str, Any]]:
        """Every rank does `what` at the same time; their answers. Raises EOFError where one has ended."""
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send("")
            process.join()


def rate(answers: list[dict[str, Any]]) -> float:
    """Bytes per second of ranks that worked side by side: from the first that began to the last that ended."""
    span = max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)
    return float(sum(answer["bytes"] for answer in answers) / span)


def measure(directory: Path, world_size: int, threads: int, rounds: int) -> Figures:
    """The best of `rounds`."""
    ranks = Ranks(directory, world_size, threads)
    try:
        copies: dict[str, list[float]] = {"huge": [], "small": []}
        loads = []
        for _ in range(rounds):
            for pages, rates in copies.items():
                rates.append(rate(ranks.all_do(pages)))
            loads.append(ranks.all_do("load"))
    finally:
        ranks.close()
    return Figures(
        share=max(answer["bytes"] for answer in loads[0]),
        copy={pages: max(rates) for pages, rates in copies.items()},
        read=max(rate(answers) for answers in loads),
        load_seconds=min(max(answer["seconds"] for answer in answers) for answers in loads),
    )


def sheet(figures: dict[str, Figures]) -> Sheet:
    found = list(figures.values())
    rows = [
        ("share of a rank, GB", *(f"{one.share / 1e9:.2f}" for one in found)),
        ("copy to fresh huge pages, GB/s", *(f"{one.copy['huge'] / 1e9:.2f}" for one in found)),
        ("copy to fresh small pages, GB/s", *(f"{one.copy['small'] / 1e9:.2f}" for one in found)),
        ("loader, reading, GB/s", *(f"{one.read / 1e9:.2f}" for one in found)),
        ("loader over the better copy", *(f"{one.part:.0%}" for one in found)),
        ("load_model in all, s", *(f"{one.load_seconds:.2f}" for one in found)),
    ]
    return Sheet(("", *figures), rows)


def main(
    directory: Annotated[
        Path | None, typer.Argument(help="A model directory; without one a random Llama is written.")
    ] = None,
    gigabytes: Annotated[float, typer.Option(help="Size of the random model.", min=0.1)] = 1.5,
    ranks: Annotated[str, typer.Option(help="Ring sizes, with commas between them.")] = "1,2",
    rounds: Rounds = 5,
) -> None:
    """Loading from the page cache: rate against the machine's copy bandwidth."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-loading-") as scratch:
        if directory is None:
            directory = Path(scratch)
            write_random(directory, int(gigabytes * 1e9))
        figures = {}
        for size in (int(text) for text in ranks.split(",")):
            threads = max(1, CORES // size)
            name = f"{size} rank{'s' * (size > 1)} of {threads} thread{'s' * (threads > 1)}"
            figures[name] = measure(directory, size, threads, rounds)
        show(machine(), sheet(figures))


if __name__ == "__main__":
    run(main)
