"""Gaps of streams by themselves and beside a long prompt, in one run: `python -m benchmarks.engine.long_prompt --help`.

The engine and its batcher in this process, as the leader drives them, without HTTP and NATS. Some streams decode; their
steps are timed alone, then while a prompt is computed beside them, sized by time (`--stretch`, `--gap`) and not.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.inprocess import InProcess
from benchmarks.serve.workloads import Workload
from services.executor.core.settings import longest_stretch
from services.executor.scheduler.batcher import ContinuousBatcher

QUIET_STEPS = 200
"""Steps of the streams alone; the first tenth is not counted."""


class Gaps(msgspec.Struct, frozen=True):
    """Seconds between two tokens of every stream."""

    alone: list[float]
    beside: list[float]
    """While the prompt was computed."""
    prompt_tokens: int

    def row(self, name: str) -> list[str]:
        """Of the table: milliseconds, tokens/s of the prompt, and how often the quiet gap the 99th percentile is."""
        quiet, beside = _percentiles(self.alone), _percentiles(self.beside)
        figures = [*quiet, *beside]
        return [
            name,
            *(f"{seconds * 1e3:.1f}" for seconds in figures),
            f"{beside[1] / quiet[1]:.2f}",
            f"{self.prompt_tokens / sum(self.beside):,.0f}",
        ]


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return cuts[49], cuts[98]


class Streams(InProcess):
    """Streams that decode to the end of the run, and one prompt."""

    def gaps(self, streams: int, prompt_tokens: int, stretch: float, gap: float) -> Gaps:
        limits = msgspec.structs.replace(self._limits, prefill_stretch=stretch, prefill_gap=gap)
        batcher = ContinuousBatcher(self._spec, limits, f"benchmark-{stretch}")
        longest = self._spec.context_length
        for _ in range(streams):
            batcher.add(self._request(Workload("stream", 1, 1, 64, longest - 65)))
        alone = [self._timed_step(batcher)[0] for _ in range(QUIET_STEPS)]
        batcher.add(self._request(Workload("long", 1, 1, prompt_tokens, 1)))
        beside = []
        ended = 0
        while not ended:
            seconds, ended = self._timed_step(batcher)
            beside.append(seconds)
        return Gaps(alone[QUIET_STEPS // 10 :], beside, prompt_tokens)

    def _timed_step(self, batcher: ContinuousBatcher) -> tuple[float, int]:
        """Seconds of a step, planning included, and how many requests have ended with it."""
        began = time.perf_counter()
        scheduled = batcher.schedule(began)
        assert scheduled is not None, "the streams go on"
        plan, rows = scheduled
        planned = time.perf_counter()
        sampled = self._engine.execute(plan, [row.sampling for row in rows])
        told = batcher.update(sampled, time.perf_counter() - planned)
        ended = sum(bool(entry.finish) for entries in told.values() for entry in entries)
        return time.perf_counter() - began, ended


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.", min=2)] = 6800,
    streams: Annotated[int, typer.Option(help="Requests that decode.", min=1)] = 4,
    stretch: Annotated[str, typer.Option(help="As the executor's --prefill-stretch.")] = "1.5",
    gap: Annotated[float, typer.Option(help="As the executor's --prefill-gap.", min=0)] = 0.02,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
) -> None:
    """Gaps of streams by themselves and beside a long prompt, shared by time and not."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    table = Table(
        "prefill_stretch", "alone, ms p50", "p99", "beside, ms p50", "p99", "p99 / p99", "prompt tokens/s"
    )
    with tempfile.TemporaryDirectory() as scratch:
        ring = Streams(model, Path(scratch), threads)
        for setting in (stretch, "off"):
            table.add_row(*ring.gaps(streams, prompt, longest_stretch(setting), gap).row(setting))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
