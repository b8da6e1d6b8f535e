"""The engine driven without HTTP and NATS: `python -m benchmarks.inprocess --help`.

The same batcher, plans, ring and sampler as behind the server, in one process, over the shapes of W1 to W3
with random prompts. What is not the model (planning, block tables, sampling, the tokens' way back) is timed
apart. With --url the same shapes are then put on a server, and the ratio tells what serving costs.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.progress import Progress

from benchmarks.engine.in_process import ring_in, set_threads, take_step
from benchmarks.harness import CORES, ModelDirectory, Rounds, Sheet, Threads, machine, run, show
from benchmarks.process_cpu import cpu_seconds, stack_at
from benchmarks.serve import __main__
from benchmarks.serve.workloads import WORKLOADS, Workload
from services.executor.core.settings import ExecutorSettings
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
from shared.config import load_settings
from shared.messages import GenerationRequest, SamplingParams

SHAPES = ("W1", "W2", "W3")


@dataclass
class Times:
    """Seconds of one workload's run."""

    wall: float = 0.0
    model: float = 0.0
    """In the forward pass."""
    blocks: float = 0.0
    """Compressing and moving KV blocks."""
    sampling: float = 0.0
    planning: float = 0.0
    """Scheduling, and taking the tokens back."""
    tokens: int = 0
    steps: int = 0

    @property
    def outside(self) -> float:
        """Share of the time that is neither the model's nor the KV cache's."""
        return (self.sampling + self.planning) / self.wall


class InProcess:
    """One rank of a ring and its batcher, as the leader has them."""

    def __init__(self, directory: Path, scratch: Path, threads: int) -> None:
        settings = load_settings(ExecutorSettings, model=str(directory), threads=threads)
        self._engine = ring_in(scratch, settings)
        self._spec = self._engine.load(lambda done, total: None)
        self.execute = self._engine.execute
        self._limits = BatchSettings(settings.max_batch_tokens, settings.max_sequences, max_drafts=0)
        self._random = random.Random(1)
        self._names = count()
        self._forward = self._blocks = 0.0
        self._time_parts()

    def run(self, workload: Workload) -> Times:
        """A closed loop of the workload's clients."""
        batcher = ContinuousBatcher(self._spec, self._limits, "benchmark")
        times, left = Times(), workload.requests
        began = time.perf_counter()
        free = workload.clients
        while True:
            for _ in range(min(free, left)):
                batcher.add(self._request(workload))
                left -= 1
            if not batcher.has_work:
                times.wall = time.perf_counter() - began
                return times
            free = self._step(batcher, times)

    def _step(self, batcher: ContinuousBatcher, times: Times) -> int:
        """How many requests have ended with it."""
        self._forward = self._blocks = 0.0
        step = take_step(batcher, self.execute)
        times.planning += step.planned - step.began + step.ended - step.computed
        times.model += self._forward
        times.blocks += self._blocks
        times.sampling += step.computed - step.planned - self._forward - self._blocks
        times.tokens += sum(len(entry.tokens) for entry in step.entries)
        times.steps += 1
        return sum(bool(entry.finish) for entry in step.entries)

    def _request(self, workload: Workload) -> GenerationRequest:
        name = str(next(self._names))
        prompt = [self._random.randrange(100, self._spec.vocab_size) for _ in range(workload.prompt_tokens)]
        return GenerationRequest(
            name, name, "m", "c", prompt, workload.output_tokens, SamplingParams(temperature=0)
        )

    def _time_parts(self) -> None:
        """Has the model's and the KV cache's part of each step timed."""
        member = self._engine._member  # noqa: SLF001  # a benchmark looks inside
        assert member is not None
        runner = member.runner
        for name in ("_compute", "_compute_largest"):
            setattr(runner, name, self._timed(getattr(runner, name), "_forward"))
        copier = runner._copier  # noqa: SLF001
        copier.run = self._timed(copier.run, "_blocks")  # type: ignore[method-assign]

    def _timed(self, compute: Callable[..., Any], into: str) -> Callable[..., Any]:
        """`compute`, its seconds added to the attribute `into`."""

        def timed(*arguments: object) -> Any:
            began = time.perf_counter()
            result = compute(*arguments)
            setattr(self, into, getattr(self, into) + time.perf_counter() - began)
            return result

        return timed


@dataclass
class Served:
    """One workload on a server."""

    rate: float
    """Output tokens/s."""
    cpu_ms: dict[str, float]
    """Processor time per output token by service, warm-up included; empty where the server runs elsewhere."""


def served(url: str, name: str, rounds: int) -> Served:
    """A server's figures on a workload."""
    seed = random.SystemRandom().getrandbits(32)
    plan = __main__.Plan(url, [WORKLOADS[name]], seed, rounds=rounds)
    processes = stack_at(urlsplit(url).port or 80) | {"load client": [os.getpid()]}
    before = cpu_seconds(processes)
    report = __main__.run_to_end(plan, Progress(disable=True))
    after = cpu_seconds(processes)
    tokens = sum(run.output_tokens for round_ in report.rounds for run in round_)
    cpu = (
        {name: (after[name] - before[name]) * 1e3 / tokens for name in processes}
        if len(processes) > 1
        else {}
    )
    return Served(report.summaries[0].output_tokens_per_second, cpu)


def cpu_of(runs: dict[str, Served]) -> Sheet:
    """Where the server's processor time goes."""
    services = next(iter(runs.values())).cpu_ms
    rows = [(name, *(f"{run.cpu_ms[name]:.2f}" for run in runs.values())) for name in services]
    return Sheet(("CPU ms a token", *runs), rows)


def main(
    model: ModelDirectory,
    url: Annotated[str | None, typer.Option(help="Also measure the server at this address.")] = None,
    threads: Threads = CORES,
    rounds: Rounds = 3,
) -> None:
    """The engine driven without HTTP and NATS, and next to a server."""
    set_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        engine = InProcess(model, Path(scratch), threads)
        runs = {name: [engine.run(WORKLOADS[name]) for _ in range(rounds)] for name in SHAPES}
    behind = {name: served(url, name, rounds) for name in SHAPES} if url else {}
    rows = []
    for name, times in runs.items():
        best = min(times, key=lambda run: run.wall)
        rate = best.tokens / best.wall
        spent = (best.wall, best.model, best.blocks, best.sampling, best.planning)
        each = (f"{1e3 * part / best.steps:.2f}" for part in spent)
        there = f"{behind[name].rate:.0f} ({behind[name].rate / rate:.0%})" if behind else ""
        rows.append((name, f"{rate:.0f}", best.steps, *each, f"{best.outside:.1%}", there))
    head = ("", "tok/s", "steps", "ms a step", "model", "blocks", "sampling", "planning", "outside", "served")
    show(Sheet(head, rows), *([cpu_of(behind)] if behind else []), machine())


if __name__ == "__main__":
    run(main)
