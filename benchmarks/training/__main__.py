"""Fine-tuning by LoRA, ours beside peft and transformers: `python -m benchmarks.training --help`.

Each way is a process of its own that trains the same generated conversations; rounds are interleaved, and the median
over them counts. A first round is not timed: in it memory is looked at while the processes run.

    tokens/s      of the examples' own tokens: padding counts nothing
    anonymous     peak of memory that the process has to itself (smaps_rollup), from its start
    PSS           the same with its part of what is mapped, which others share: the base, where it is mapped
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.errors import BenchError
from benchmarks.harness import CORES, JsonFile, Rounds, Sheet, Threads, machine, one_of, publish, run, turns
from benchmarks.processes import status_bytes
from benchmarks.training.examples import conversations
from benchmarks.training.process import vocabulary_of
from benchmarks.training.task import Result, Task
from shared.process import die_with_parent

LOOK_S = 0.1
"""Between two looks at a process's memory."""
GOAL_MEMORY = 0.5


@dataclass
class Peak:
    """Bytes, the most that were seen of a process."""

    anonymous: int = 0
    pss: int = 0

    def look(self, pid: int) -> None:
        """Once; a process that has ended has none."""
        self.anonymous = max(self.anonymous, status_bytes(pid, "smaps_rollup", "Anonymous"))
        self.pss = max(self.pss, status_bytes(pid, "smaps_rollup", "Pss"))


@dataclass
class Found:
    """Of one way, over the rounds."""

    task: Task
    results: list[Result] = field(default_factory=list)
    peak: Peak = field(default_factory=Peak)

    @property
    def rate(self) -> float:
        return statistics.median(result.rate for result in self.results)


def tasks(model: Path, cache: Path, four: Sequence[str], **options: int) -> list[Task]:
    """What is compared: both with the base in bf16, and ours with each of `four`."""
    found = []
    for packs, recompute, master in (
        (False, True, True),
        (False, False, True),
        (True, True, True),
        (True, False, False),
    ):
        words = ["packed" if packs else "padded"]
        words += ["recomputing"] * recompute + ["factors in bf16"] * (not master)
        found.append(Task(f"peft, {', '.join(words)}", "peft", str(model), "bf16", recompute, packs, master))
    if find_spec("bitsandbytes") is not None:
        found.append(Task("peft, padded, recomputing, bitsandbytes", "peft", str(model), "nf4", packs=False))
    for side, way in (("ours", "ours"), ("trainer", "ours, as a job")):
        found += [Task(way, side, str(model), weights) for weights in ("bf16", *four)]
    return [msgspec.structs.replace(task, cache=str(cache), **options) for task in found]


def run_task(task: Task, peak: Peak | None = None) -> Result:
    """The task in a process of its own, whose memory `peak` is of. Raises `BenchError`."""
    if task.side == "trainer":
        from benchmarks.training.with_ryzanstein import as_a_job

        with _looking(peak) as look_at:
            return as_a_job(task, conversations(task.examples, vocabulary_of(task.model)), look_at)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.training.process", msgspec.json.encode(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"},
        preexec_fn=die_with_parent(),
    )
    with _looking(peak) as look_at:
        look_at(process.pid)
        said, errors = process.communicate()
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no words"])[-1]
        raise BenchError(f"{task.way} with {task.weights} failed: {last}")
    return msgspec.json.decode(said.splitlines()[-1], type=Result)


@contextlib.contextmanager
def _looking(peak: Peak | None) -> Iterator[Callable[[int], None]]:
    """Given a process, a thread looks at its memory now and then, until the end."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def look(pid: int) -> None:
        while peak is not None and not over.wait(LOOK_S):
            peak.look(pid)

    def look_at(pid: int) -> None:
        threads.append(threading.Thread(target=look, args=(pid,)))
        threads[-1].start()

    try:
        yield look_at
    finally:
        over.set()
        for thread in threads:
            thread.join()


def measure(compared: Sequence[Task], rounds: int) -> list[Found]:
    """A way that fails is told, and left out."""
    found = []
    for task in compared:
        one = Found(task)
        try:
            # What is packed once for all is not training's: the process that does it is not the one that counts.
            if task.side == "ours" and task.weights != "bf16":
                run_task(msgspec.structs.replace(task, examples=1, batch=1))
            run_task(task, one.peak)
        except BenchError as error:
            typer.echo(f"error: {error}", err=True)
            continue
        found.append(one)
    for at, one in turns(found, rounds):
        one.results.append(run_task(one.task))
        typer.echo(f"round {at + 1}: {_name(one.task)}: {one.results[-1].rate:.0f} tokens/s", err=True)
    return found


def sheet(found: Sequence[Found], title: str) -> Sheet:
    best = max((one.rate for one in found if one.task.side == "peft"), default=0.0)
    rows = [
        (
            *(one.task.way, one.task.weights, f"{one.rate:.0f}", f"{one.rate / best:.2f}" if best else "-"),
            *(f"{one.peak.anonymous / 1e6:.0f}", f"{one.peak.pss / 1e6:.0f}"),
            f"{statistics.fmean(result.loss for result in one.results):.3f}",
        )
        for one in found
    ]
    head = ("way", "base", "tokens/s", "of peft's best", "anonymous MB", "PSS MB", "loss")
    return Sheet(head, rows, title, left=("base",))


def verdicts(found: Sequence[Found]) -> list[str]:
    """The aims, and whether they are met."""
    peers = [one for one in found if one.task.side == "peft" and one.task.weights == "bf16"]
    ours = {one.task.weights: one for one in found if one.task.side == "ours"}
    lines = []
    if not peers:
        return lines
    if "bf16" in ours:
        for name, some in (
            ("that recomputes", [one for one in peers if one.task.recompute]),
            ("in any way", peers),
        ):
            if not some:
                continue
            times = ours["bf16"].rate / max(one.rate for one in some)
            lines.append(
                _verdict(times >= 1, f"tokens/s with a bf16 base are {times:.2f} of peft's {name}; 1 or more")
            )
    least = min(peers, key=lambda one: one.peak.pss).peak
    for weights, one in ours.items():
        if weights != "bf16":
            share = one.peak.pss / least.pss
            said = (
                f"memory with a {weights} base is {share:.2f} of peft's least in bf16; {GOAL_MEMORY} or less"
            )
            lines.append(_verdict(share <= GOAL_MEMORY, said))
    return lines


def _verdict(met: bool, what: str) -> str:
    return f"{'met' if met else 'not met'}: {what}"


def _name(task: Task) -> str:
    return f"{task.way}, {task.weights}"


def main(
    model: Annotated[
        Path | None,
        typer.Argument(help="Directory of a bf16 checkpoint; without one random weights in a model's shape."),
    ] = None,
    shape: Annotated[str, typer.Option(help="Of the random model: 135M (SmolLM2) or 1.1B.")] = "135M",
    weights: Annotated[str, typer.Option(help="What our base is quantized as, beside bf16.")] = "q4_k,int4",
    examples: Annotated[int, typer.Option(help="Conversations of a round.", min=1)] = 32,
    batch: Annotated[int, typer.Option(help="Of them in a step.", min=1)] = 8,
    rank: Annotated[int, typer.Option(help="Of the adapter, on all linears.", min=1, max=256)] = 16,
    rounds: Rounds = 3,
    threads: Threads = CORES,
    json: JsonFile = None,
) -> None:
    """Tokens a second and memory of fine-tuning, ours beside peft and transformers."""
    from benchmarks.engine.adapters import MODELS
    from benchmarks.engine.floors import write_random

    one_of("--shape", [shape], MODELS)
    with tempfile.TemporaryDirectory(prefix="ryzanstein-training-") as scratch:
        title = f"{model.name if model else shape}, {machine()}"
        if model is None:
            model = Path(scratch, "model")
            model.mkdir()
            write_random(model, MODELS[shape])
        options = {"examples": examples, "batch": batch, "rank": rank, "threads": threads}
        four = [one for one in weights.split(",") if one]
        found = measure(tasks(model, Path(scratch, "packed"), four, **options), rounds)
    report = [
        msgspec.structs.asdict(one.task)
        | {"tokens_per_second": one.rate, "anonymous": one.peak.anonymous, "pss": one.peak.pss}
        | {"results": one.results}
        for one in found
    ]
    publish(report, sheet(found, title), *verdicts(found), json=json)


if __name__ == "__main__":
    run(main)
