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

from benchmarks.harness import CORES, Rounds, Sheet, machine, run, show
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
    for when, prefix in (("reading", "read_"), ("in all", "")):
        for kind in ("anonymous", "resident"):
            cells = (f"{one.memory[prefix + kind]:.3f}" for one in found)
            rows.append((f"peak {kind} over share, {when}", *cells))
    return Sheet(("", *figures), rows)


def main(
    directory: Annotated[
        Path | None, typer.Argument(help="A model directory; without one a random Llama is written.")
    ] = None,
    gigabytes: Annotated[float, typer.Option(help="Size of the random model.", min=0.1)] = 1.5,
    ranks: Annotated[str, typer.Option(help="Ring sizes, with commas between them.")] = "1,2",
    dtype: Annotated[str, typer.Option(help="What the ranks serve: bf16 or fp32.")] = "bf16",
    rounds: Rounds = 5,
) -> None:
    """Loading from the page cache: rate against the machine's copy bandwidth, and peak memory."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-loading-") as scratch:
        if directory is None:
            directory = Path(scratch)
            write_random(directory, int(gigabytes * 1e9))
        figures = {}
        for size in (int(text) for text in ranks.split(",")):
            threads = max(1, CORES // size)
            name = f"{size} rank{'s' * (size > 1)} of {threads} thread{'s' * (threads > 1)}"
            figures[name] = measure(directory, size, threads, dtype, rounds)
        show(f"{machine()}; served in {dtype}", sheet(figures))


if __name__ == "__main__":
    run(main)
