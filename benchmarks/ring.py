"""What a second rank gains and what it costs: `python -m benchmarks.ring --help`.

Prints decode and prefill at one rank and at two, one thread each, and the part of a step that each rank spends in
collectives (in which it also waits for a rank that has more to compute).

The rank processes are the executor's own ring, without its leader's queue: the parent tells rank 0 what to run, and the
others follow its plans, as in service.
"""

import multiprocessing
import os
import statistics
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
import typer
from msgspec import structs

from benchmarks.engine.steps import Decode, Prefill
from benchmarks.harness import Dtype, JsonFile, Report, Rounds, Sheet, about, in_turns, median, one_of, publish, run
from benchmarks.random_model import shape_option, write_checkpoint
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.supervisor.ranks.early_fork_server import RUNTIME
from shared.data_types import KvDType
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from services.executor.collectives.base import Collectives


READY_TIMEOUT = 300.0
WARM_UP = 3
_FIGURES = 2  # of a rank, in seconds so far: in collectives, and waiting there


class Share(msgspec.Struct, frozen=True):
    """Of one rank's step time, what it spent in collectives, and what of that it waited for others."""

    communication: float
    waiting: float


class Timing(msgspec.Struct, frozen=True):
    """Of one kind of step on one ring."""

    milliseconds: float  # median
    tokens_per_second: float
    shares: list[Share]  # one per rank


class BenchRing:
    """A ring of `world` processes of one thread each that stay up until `close`."""

    def __init__(self, settings: dict[str, object], world: int) -> None:
        # Read when torch is imported.
        os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT=RUNTIME["GOMP_SPINCOUNT"])
        settings = settings | {"tp": world, "threads": 1}
        context = multiprocessing.get_context("spawn")
        self._directory = TemporaryDirectory(prefix="ryzanstein-bench-")
        board = Path(self._directory.name, "board")
        RingBoard(board, world, create=True)
        self._times: SynchronizedArray[Any] = context.Array("d", _FIGURES * world)
        self._world = world
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(world)), strict=True)
        self._processes = [
            context.Process(target=_rank, args=(settings, spec, theirs[spec.rank], self._times), daemon=True)
            for spec in (RankSpec(rank, world, "bench", "bench", 1, str(board), {}) for rank in range(world))
        ]
        for process in self._processes:
            process.start()
        if world > 1:
            rendezvous = self._answer()
            for pipe in self._pipes[1:]:
                pipe.send(rendezvous)
        self._blocks: tuple[int, int] = self._answer()

    def begin(self, kind: Decode | Prefill) -> StepPlan:
        """The plan of the steps to measure; what they read has been computed."""
        steps = kind.steps(*self._blocks)
        for plan in steps.before:
            self._run(plan, 1)
        return steps.measured

    def steps(self, plan: StepPlan, count: int) -> tuple[list[float], list[Share]]:
        """(seconds of each step, what each rank spent during them)."""
        self._run(plan, WARM_UP)
        before = self._times[:]
        seconds = self._run(plan, count)
        used = [new - old for new, old in zip(self._times[:], before, strict=True)]
        ranks = [used[_FIGURES * rank : _FIGURES * (rank + 1)] for rank in range(self._world)]
        return seconds, [Share(busy / sum(seconds), waited / sum(seconds)) for busy, waited in ranks]

    def _run(self, plan: StepPlan, count: int) -> list[float]:
        """Seconds of each of `count` steps."""
        self._pipes[0].send((plan, count))
        seconds: list[float] = self._answer()
        return seconds

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._directory.cleanup()

    def _answer(self) -> Any:
        pipe = self._pipes[0]
        waited = time.monotonic() + READY_TIMEOUT
        while not pipe.poll(0.2):
            dead = [process.exitcode for process in self._processes if process.exitcode not in (None, 0)]
            if dead or time.monotonic() > waited:
                raise SystemExit("error: a rank of the benchmark's ring has ended; its last words are above.")
        return pipe.recv()


def _rank(values: dict[str, object], spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]") -> None:
    import torch

    settings = ExecutorSettings.model_validate(values)
    torch.set_num_threads(settings.threads)
    if spec.rank == 0:
        _lead(settings, spec, pipe, times)
    else:
        _follow(settings, spec, pipe, times)


def _member(settings: ExecutorSettings, spec: RankSpec, collectives: "Collectives") -> Any:
    import torch

    from services.executor.worker.drafting.kind import Directories
    from services.executor.worker.engine import Worker

    board = RingBoard(Path(spec.board), spec.world_size).rank(spec.rank)
    device, where = torch.device("cpu"), Directories(Path(settings.model), None)
    return Worker.load(settings, spec, board, where, device, collectives, lambda done, total: None)


def _lead(settings: ExecutorSettings, spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]") -> None:
    import torch

    from services.executor.core.sampling_state import SamplingState
    from services.executor.sampling.sampler import Sampler, wants_of
    from services.executor.worker import rendezvous as meeting

    sender, collectives = meeting.lead(settings, spec, torch.device("cpu"), Path(settings.model), pipe.send)
    member, sampler = _member(settings, spec, collectives), Sampler()
    runner, blocks = member.runner, member.engine_spec
    pipe.send((blocks.num_blocks, blocks.num_quantized))
    while (order := pipe.recv()) is not None:
        plan, count = order
        rows = len(plan.sample_rows) // 4
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            states = [SamplingState(SamplingParams(temperature=0), [1], []) for _ in range(rows)]
            wants = wants_of(states, runner.vocab_size).tobytes()
            wanting = structs.replace(plan, candidates=wants)
            sender.send(wanting)
            logits = runner.forward(wanting)
            if states:
                assert logits is not None, "rank 0 gets the logits"
                sampler.sample(logits, states)
            seconds.append(time.perf_counter() - began)
        _note(collectives, times)
        pipe.send(seconds)
    sender.close()


def _follow(settings: ExecutorSettings, spec: RankSpec, pipe: Connection, times: "SynchronizedArray[Any]") -> None:
    import torch

    from services.executor.worker import rendezvous as meeting

    rendezvous: Rendezvous = pipe.recv()
    receiver, collectives = meeting.follow(settings, spec, rendezvous, torch.device("cpu"))
    runner = _member(settings, spec, collectives).runner
    while (plan := receiver.receive()) is not None:
        runner.forward(plan)
        _note(collectives, times)


def _note(collectives: "Collectives", times: "SynchronizedArray[Any]") -> None:
    from services.executor.collectives.shared_memory import SharedMemory

    figures = [0.0] * _FIGURES
    if isinstance(collectives, SharedMemory):
        figures = [collectives.busy_seconds, collectives.waited_seconds]
    times[_FIGURES * collectives.rank : _FIGURES * (collectives.rank + 1)] = figures


KINDS: dict[str, Decode | Prefill] = {
    "decode, 16 sequences of 320": Decode(16, 320),
    "prefill, 512 tokens": Prefill(512),
}


class Scaling(msgspec.Struct, frozen=True):
    """One kind of step at one rank and at two."""

    step: str
    one: Timing
    two: Timing

    @property
    def ratio(self) -> float:
        """What the second rank brings."""
        return self.two.tokens_per_second / self.one.tokens_per_second


class RingReport(Report, frozen=True, kw_only=True):
    scalings: list[Scaling]


def measure_steps(settings: dict[str, object], kinds: dict[str, Decode | Prefill], rounds: int) -> list[Scaling]:
    """All rings are up at once and take turns, so that what disturbs the machine disturbs all."""
    rings = [BenchRing(settings, 1), BenchRing(settings, 2)]
    scalings = []
    for name, kind in kinds.items():
        plans = [ring.begin(kind) for ring in rings]
        work = {at: partial(ring.steps, plans[at], 8) for at, ring in enumerate(rings)}
        timings = [
            timing(plans[at], [second for taken, _ in runs for second in taken], [share for _, share in runs])
            for at, runs in in_turns(work, rounds).items()
        ]
        scalings.append(Scaling(name, *timings))
    for ring in rings:
        ring.close()
    return scalings


def timing(plan: StepPlan, seconds: list[float], shares: list[list[Share]]) -> Timing:
    """Medians over all steps, and over the rounds for each rank's shares."""
    taken = statistics.median(seconds)
    return Timing(taken * 1e3, len(plan.token_ids) // 4 / taken, median(shares))


def sheets(report: RingReport) -> list[Sheet]:
    steps = []
    for scaling in report.scalings:
        shares = [f"{one.communication:.1%} ({one.waiting:.1%})" for one in scaling.two.shares]
        for name, found, ratio, parts in (
            ("1 rank", scaling.one, "", ["", ""]),
            ("2 ranks", scaling.two, f"{scaling.ratio:.2f}", shares),
        ):
            ms, rate = f"{found.milliseconds:.1f}", f"{found.tokens_per_second:.0f}"
            steps.append((scaling.step, name, ms, rate, ratio, *parts))
    waits = (f"rank {rank} in sums (waiting)" for rank in range(2))
    return [Sheet(("step", "", "ms", "tok/s", "ratio", *waits), steps, left=("",))]


def main(
    model: Annotated[
        Path | None, typer.Argument(help="A model directory; `ryzanstein models list` shows where one is.")
    ] = None,
    random: Annotated[
        str, typer.Option(help="Instead: a random Llama, as hidden,heads,kv_heads,inner,layers,vocabulary.")
    ] = "",
    dtype: Dtype = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Of full KV blocks: auto, bf16, int8 or fp8.")] = "auto",
    rounds: Rounds = 5,
    json: JsonFile = None,
) -> None:
    """Decode and prefill at one rank and at two."""
    one_of("--kv-dtype", [kv_dtype], get_args(KvDType))
    if (model is None) != bool(random):
        raise typer.BadParameter("Name a model directory, or a shape with --random, and not both.")
    settings: dict[str, object] = {"dtype": dtype, "device": "cpu", "kv_dtype": kv_dtype}
    with TemporaryDirectory(prefix="ryzanstein-bench-") as scratch:
        if model is None:
            write_checkpoint(Path(scratch), shape_option(random))
        settings["model"] = str((model or Path(scratch)).resolve())
        report = RingReport(**about(), scalings=measure_steps(settings, KINDS, rounds))
    publish(report, *sheets(report), json=json)


if __name__ == "__main__":
    run(main)
