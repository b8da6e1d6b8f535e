"""Gaps of streams by themselves and beside a long prompt, in one run: `python -m benchmarks.engine.long_prompt --help`.

The engine and its batcher in this process, as the leader drives them, without HTTP and NATS. Some streams decode; their
steps are timed alone, then while a prompt is computed beside them, sized by time (`--stretch`, `--gap`) and not.
`--depths` tells instead what few prompt tokens add to a step of those streams, behind so many that are computed.
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

from benchmarks.engine.steps import BLOCK, load_one_rank
from benchmarks.inprocess import InProcess
from benchmarks.serve.workloads import Workload
from services.executor.core.settings import longest_stretch
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.store import KvStore
from services.executor.scheduler.batcher import ContinuousBatcher

QUIET_STEPS = 200
"""Steps of the streams alone; the first tenth is not counted."""
STREAM_TOKENS = 200
COUNTS = (1, 4, 8, 16)
"""Prompt tokens in a step."""
ROUNDS = 15


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


# --- what prompt tokens add ----------------------------------------------------------------------


def step_beside(store: KvStore, streams: int, count: int, depth: int) -> StepPlan:
    """A decode of each stream, 200 tokens long, and `count` tokens of a prompt behind `depth` that are computed."""
    contexts = [STREAM_TOKENS] * streams + ([depth + count] if count else [])
    widths = [1] * streams + ([count] if count else [])
    tables, slots, positions = list[int](), list[int](), list[int]()
    hot, full = 0, store.num_hot
    for context, width in zip(contexts, widths, strict=True):
        sealed, blocks = (context - width) // BLOCK, -(-context // BLOCK)
        table = [*range(full, full + sealed), *range(hot, hot + blocks - sealed)]
        full, hot = full + sealed, hot + blocks - sealed
        tables += table
        positions += range(context - width, context)
        slots += [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(context - width, context)]
    return StepPlan(
        step=1,
        num_decodes=streams,
        token_ids=to_bytes([100] * sum(widths)),
        positions=to_bytes(positions),
        slots=to_bytes(slots),
        query_lens=to_bytes(widths),
        context_lens=to_bytes(contexts),
        block_tables=to_bytes(tables),
        sample_rows=to_bytes(list(range(streams))),
    )


def show_added(model: Path, streams: int, depths: list[int], threads: int, console: Console) -> None:
    """CPU milliseconds of steps in turns, by depth and prompt tokens."""
    most = -(-(max(depths) + max(COUNTS)) // BLOCK) + streams * (STREAM_TOKENS // BLOCK + 1)
    runner, store = load_one_rank(model, "bf16", threads, most + BLOCK, "int8")
    plans = {(0, 0): step_beside(store, streams, 0, 0)}
    plans |= {
        (depth, count): step_beside(store, streams, count, depth) for depth in depths for count in COUNTS
    }
    spent: dict[tuple[int, int], list[float]] = {key: [] for key in plans}
    for _ in range(ROUNDS):
        for key, plan in plans.items():
            before = time.process_time()
            runner.forward(plan)
            spent[key].append((time.process_time() - before) * 1e3)
    table = Table(
        "CPU ms, behind so many tokens", "no prompt", *(f"{count} of its tokens" for count in COUNTS)
    )
    for depth in depths:
        row = [spent[0, 0], *(spent[depth, count] for count in COUNTS)]
        table.add_row(f"{depth:,}", *(f"{statistics.median(each):.1f}" for each in row))
    console.print(table)


def main(
    model: Annotated[
        Path, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ],
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.", min=2)] = 6800,
    streams: Annotated[int, typer.Option(help="Requests that decode.", min=1)] = 4,
    stretch: Annotated[str, typer.Option(help="As the executor's --prefill-stretch.")] = "1.5",
    gap: Annotated[float, typer.Option(help="As the executor's --prefill-gap.", min=0)] = 0.02,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = len(os.sched_getaffinity(0)),
    depths: Annotated[
        str, typer.Option(help="Tell what prompt tokens add to a step behind so many, such as 1000,6000.")
    ] = "",
) -> None:
    """Gaps of streams by themselves and beside a long prompt, shared by time and not."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if depths:
        show_added(model, streams, [int(each) for each in depths.split(",")], threads, Console())
        return
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
