"""Gaps of streams by themselves and beside a long prompt, in one run: `python -m benchmarks.engine.long_prompt --help`.

The engine and its batcher in this process, as the leader drives them, without HTTP and NATS. Some streams decode; their
steps are timed alone, then while a prompt is computed beside them, sized by time (`--stretch`, `--gap`) and not.
`--depths` tells instead what few prompt tokens add to a step of those streams, behind so many that are computed.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.engine.in_process import InProcess, set_threads, steps_of, take_step
from benchmarks.engine.steps import BLOCK, Row, fill_quantized, load_one_rank, step_plan
from benchmarks.harness import CORES, ModelDirectory, Sheet, Threads, in_turns, run, show
from benchmarks.serve.workloads import Workload
from services.executor.core.settings import longest_stretch
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.store import KvStore
from services.executor.scheduler.batcher import Scheduler

QUIET_STEPS = 200  # steps of the streams alone; the first tenth is not counted
STREAM_TOKENS = 200
COUNTS = (1, 4, 8, 16, 256)  # prompt tokens in a step
ROUNDS = 15


class Gaps(msgspec.Struct, frozen=True):
    """Seconds between two tokens of every stream."""

    alone: list[float]
    beside: list[float]  # while the prompt was computed
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
        batcher = Scheduler(self._spec, limits, f"benchmark-{stretch}")
        longest = self._spec.context_length
        for number in range(streams):
            batcher.add(self._request(Workload("stream", 1, 1, 64, longest - 65), number))
        alone = [take_step(batcher, self._engine.execute).seconds for _ in range(QUIET_STEPS)]
        batcher.add(self._request(Workload("long", 1, 1, prompt_tokens, 1), streams))
        beside = []
        for step in steps_of(batcher, self._engine.execute):
            beside.append(step.seconds)
            if any(entry.finish for entry in step.entries):
                break
        return Gaps(alone[QUIET_STEPS // 10 :], beside, prompt_tokens)


# --- what prompt tokens add ----------------------------------------------------------------------


def step_beside(store: KvStore, streams: int, count: int, depth: int) -> StepPlan:
    """A decode of each stream, 200 tokens long, and `count` tokens of a prompt behind `depth` that are computed."""
    rows, writable, full = [], 0, store.num_writable
    for context, width in [*[(STREAM_TOKENS, 1)] * streams, *[(depth + count, count)] * bool(count)]:
        sealed, blocks = (context - width) // BLOCK, -(-context // BLOCK)
        rows.append(Row(context, width, [*range(full, full + sealed), *range(writable, writable + blocks - sealed)]))
        full, writable = full + sealed, writable + blocks - sealed
    return step_plan(rows, num_decodes=streams, sample_rows=to_bytes(list(range(streams))))


def added(model: Path, streams: int, depths: list[int], threads: int) -> Sheet:
    """CPU milliseconds of steps in turns, by depth and prompt tokens."""
    most = -(-(max(depths) + max(COUNTS)) // BLOCK) + streams * (STREAM_TOKENS // BLOCK + 1)
    runner, store = load_one_rank(model, "bf16", threads, most + BLOCK, "int8")
    fill_quantized(store)

    def spent(depth: int, count: int) -> float:
        before = time.process_time()
        runner.forward(plans[depth, count])
        return (time.process_time() - before) * 1e3

    cases = [(0, 0), *((depth, count) for depth in depths for count in COUNTS)]
    plans = {(depth, count): step_beside(store, streams, count, depth) for depth, count in cases}
    found = in_turns({case: partial(spent, *case) for case in cases}, ROUNDS)
    taken = {case: f"{statistics.median(times):.1f}" for case, times in found.items()}
    rows = [(f"{at:,}", taken[0, 0], *(taken[at, count] for count in COUNTS)) for at in depths]
    head = ("CPU ms, behind so many tokens", "no prompt", *(f"{count} of its tokens" for count in COUNTS))
    return Sheet(head, rows)


def main(
    model: ModelDirectory,
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.", min=2)] = 6800,
    streams: Annotated[int, typer.Option(help="Requests that decode.", min=1)] = 4,
    stretch: Annotated[str, typer.Option(help="As the executor's --prefill-stretch.")] = "1.5",
    gap: Annotated[float, typer.Option(help="As the executor's --prefill-gap.", min=0)] = 0.02,
    threads: Threads = CORES,
    depths: Annotated[
        str, typer.Option(help="Tell what prompt tokens add to a step behind so many, such as 1000,6000.")
    ] = "",
) -> None:
    """Gaps of streams by themselves and beside a long prompt, shared by time and not."""
    set_threads(threads)
    if depths:
        show(added(model, streams, [int(each) for each in depths.split(",")], threads))
        return
    with tempfile.TemporaryDirectory() as scratch:
        ring = Streams(model, Path(scratch), threads)
        rows = [ring.gaps(streams, prompt, longest_stretch(setting), gap).row(setting) for setting in (stretch, "off")]
    head = ("prefill_stretch", "alone, ms p50", "p99", "beside, ms p50", "p99", "p99 / p99", "prompt tokens/s")
    show(Sheet(head, rows))


if __name__ == "__main__":
    run(main)
