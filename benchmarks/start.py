"""What a start takes, and a ring's return after a kill, phase by phase: `python -m benchmarks.start --help`.

    cold     up ──▶ services ──▶ imports ──▶ weights read and packed ──▶ ready ──▶ answer   kept in the background
    cached   up ──▶ services ──▶ imports ──▶ packed weights read     ──▶ ready ──▶ answer
    kill     a rank ──▶ told ──▶ forked ──▶ weights read ──▶ ready ──▶ the answer that was asked for meanwhile

Times are those of the log's lines, which every process writes on the same clock, and of the answer's first token.
What is cold is the weight cache alone: models are in the page cache.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import psutil
import typer

from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Report, Rounds, Sheet, about, publish, run
from benchmarks.processes import status_bytes
from benchmarks.random_model import shape_option, write_servable
from services.cli.target import read_run_file
from shared.models import gguf_parts

PATIENCE = 600.0
LOOK = 0.005

Line = dict[str, Any]  # one of a log


class Round(msgspec.Struct, frozen=True):
    """Seconds of each phase, in order, of one start or kill; `total` from its begin to the first token."""

    kind: str
    phases: dict[str, float]
    total: float


class StartReport(Report, frozen=True, kw_only=True):
    model: str
    model_bytes: int  # of its files of weights
    kv_bytes: int  # of the last stack's ranks, which touch them as they are used
    rounds: list[Round]
    # Proportional and unique bytes (PSS, USS) of each process of the last stack, and the most that it had resident
    # (peak RSS), by its name.
    memory: dict[str, list[int]]


@dataclass
class Log:
    """Lines of one run, by event, with their times in seconds of the epoch."""

    lines: list[Line] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> "Log":
        """All logs in `directory`, oldest line first; what is no JSON is left out."""
        found = []
        for path in directory.glob("*.log"):
            for text in path.read_text(errors="replace").splitlines():
                # Two processes may have written at once, and ended their lines afterwards.
                for part in text.replace("}{", "}\n{").splitlines():
                    with suppress(ValueError):
                        line = json.loads(part)
                        if isinstance(line, dict) and "timestamp" in line:
                            found.append(line)
        return cls(sorted(found, key=lambda line: str(line["timestamp"])))

    def of(self, event: str, since: float = 0.0, **fields: object) -> list[Line]:
        """The lines of `event` since then whose fields are these."""
        return [
            line
            for line in self.lines
            if line.get("event") == event
            and at(line) >= since
            and all(line.get(name) == value for name, value in fields.items())
        ]


def at(line: Line) -> float:
    """When `line` was written, in seconds of the epoch."""
    return datetime.fromisoformat(str(line["timestamp"])).timestamp()


def start_phases(log: Log, began: float, answered: float) -> dict[str, float]:
    """Seconds of each phase of a start at `began` whose first token came at `answered`."""
    service = at(log.of("ready", service="executor")[0])
    first = {"command line, NATS, executor's imports": service - began}
    return first | _ring_phases(log, service, answered, 0.0, "ranks' imports, forked", "seen by all, first token")


def kill_phases(log: Log, killed: float, answered: float) -> dict[str, float]:
    """Seconds of each phase of a return after a kill at `killed`."""
    told = at(log.of("ring_lost", killed)[0])
    return {"told": told - killed} | _ring_phases(log, told, answered, killed, "ended, forked", "first token")


def _ring_phases(log: Log, began: float, answered: float, since: float, forking: str, ending: str) -> dict[str, float]:
    """From `began` on, of what was logged `since` then; `forking` and `ending`: what the first and last are called."""
    forked = max(at(line) for line in log.of("rank_started", since))
    loaded = log.of("rank_loaded", since)
    ready = at(log.of("ring_ready", since)[0])
    parts = [{name: float(line.get(name, 0.0)) for name in _PARTS} for line in loaded]
    loading = max(at(line) - sum(part.values()) for line, part in zip(loaded, parts, strict=True))
    slowest = max(parts, key=lambda part: part["weights"])  # others wait for it
    return {
        forking: forked - began,
        "ranks meet": loading - forked,
        **{name: slowest[key] for key, name in _PARTS.items()},
        "announced": ready - max(map(at, loaded)),
        ending: answered - ready,
    }


# Of a rank's loading, and what they are called.
_PARTS = {
    "kernels": "kernels proven",
    "weights": "weights",
    "kv_cache": "KV cache",
    "packing": "packing",
    "warm_up": "kernels, first step",
    "others": "other ranks",
}


def phases_of(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Seconds of each phase over `rounds` of one kind, their totals included."""
    columns = [{**one.phases, "total": one.total} for one in rounds]
    return {name: [column[name] for column in columns] for name in columns[0]}


class Stack:
    """`ryzanstein up` in a directory of its own."""

    def __init__(self, directory: Path, model: str, variables: Mapping[str, str], options: Sequence[str]) -> None:
        self._directory = directory
        self._output = (directory.parent / f"{directory.name}.txt").open("wb")
        command = [sys.executable, "-m", "services.cli", "up", "--model", model, "--no-smoke-test"]
        command += ["--port", "0", "--grpc-port", "0", "--data-dir", str(directory), *options]
        self.began = time.time()
        self._process = psutil.Popen(command, env={**os.environ, **variables}, stdout=self._output, stderr=self._output)
        self._client = httpx.Client(timeout=PATIENCE, trust_env=False)
        self._asking = ThreadPoolExecutor(1)
        self.url = ""

    @property
    def log(self) -> Log:
        return Log.read(self._directory / "logs")

    def wait(self, what: str, condition: Any) -> None:
        """Until `condition()`. Raises `BenchError`."""
        give_up = time.monotonic() + PATIENCE
        while not condition():
            if self._process.poll() is not None:
                said = (self._directory.parent / f"{self._directory.name}.txt").read_text(errors="replace")
                raise BenchError(f"The stack ended before {what}: {said.strip().splitlines()[-1:]}.")
            if time.monotonic() > give_up:
                raise BenchError(f"There was no {what} within {PATIENCE:g} s.")
            time.sleep(LOOK)

    def wait_ready(self) -> None:
        self.wait("readiness", lambda: read_run_file(self._directory) is not None)
        note = read_run_file(self._directory)
        assert note is not None, "it was there"
        self.url = note.gateway_url
        models = f"{self.url}/v1/models"
        self.wait("a listed model", lambda: self._client.get(models).status_code == 200)
        self.model = str(self._client.get(models).json()["data"][0]["id"])

    def first_token(self) -> float:
        """Asks for an answer; when its first token came, in seconds of the epoch."""
        asked = {"prompt": "A ring of ranks", "max_tokens": 2, "stream": True, "ignore_eos": True}
        body = {"model": self.model, **asked}
        with self._client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if "error" in line:
                        raise BenchError(f"The stack answered {line}.")
                    return time.time()
        raise BenchError("The stack gave no token.")

    def ask(self) -> "Future[float]":
        """`first_token`, while others go on."""
        return self._asking.submit(self.first_token)

    def kill_a_rank(self) -> float:
        """The last rank, by SIGKILL; when."""
        line = max(self.log.of("rank_started"), key=lambda line: (at(line), line["rank"]))
        killed = time.time()
        os.kill(int(line["pid"]), signal.SIGKILL)
        return killed

    @property
    def processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def memory(self) -> dict[str, list[int]]:
        """(PSS, USS, peak RSS) of each process, in bytes."""
        ranks = {line["pid"]: f"rank {line['rank']}" for line in self.log.of("rank_started")}
        found = {}
        for process in self.processes:
            full = process.memory_full_info()
            words = process.cmdline()
            module = next((word for word in words if word.startswith("services.")), words[0].rpartition("/")[2])
            found[ranks.get(process.pid, module.removeprefix("services."))] = [
                full.pss,
                full.uss,
                status_bytes(process.pid, "status", "VmHWM"),
            ]
        return found

    def close(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it may have ended by itself
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except psutil.TimeoutExpired:
            self._process.kill()
        self._asking.shutdown(wait=False)
        self._client.close()
        self._output.close()


@contextmanager
def stack_of(scratch: Path, model: str, cache: Path, options: Sequence[str]) -> Iterator[Stack]:
    """A stack that is ended; `cache`: of its weights."""
    variables = {"RYZANSTEIN_LOG_FORMAT": "json", "RYZANSTEIN_MODEL_CACHE": str(cache)}
    with TemporaryDirectory(dir=scratch) as directory:
        stack = Stack(Path(directory) / "data", model, variables, options)
        try:
            yield stack
        finally:
            stack.close()


def measure_start(stack: Stack, kind: str) -> Round:
    stack.wait_ready()
    answered = stack.first_token()
    return Round(kind, start_phases(stack.log, stack.began, answered), answered - stack.began)


def measure_kill(stack: Stack) -> Round:
    killed = stack.kill_a_rank()
    stack.wait("a word of the loss", lambda: stack.log.of("ring_lost", killed))
    asked = stack.ask()
    stack.wait("ring again", lambda: stack.log.of("ring_ready", killed))
    answered = asked.result()
    return Round("kill", kill_phases(stack.log, killed, answered), answered - killed)


def weight_bytes(model: Path) -> int:
    """Of the files of weights of `model`, a directory or a GGUF file."""
    files = gguf_parts(model) if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def measure(
    scratch: Path, model: Path, rounds: int, kills: int, options: Sequence[str], ranks: int
) -> tuple[list[Round], dict[str, list[int]], int]:
    """Of `rounds` rounds, each with a cache of its own: a cold start, a cached one, so many kills; the memory of the
    last stack, of which so many bytes are for KV."""
    found: list[Round] = []
    memory: dict[str, list[int]] = {}
    kv_bytes = 0
    for number in range(rounds):
        cache = scratch / f"cache-{number}"
        with stack_of(scratch, str(model), cache, options) as stack:
            found.append(measure_start(stack, "cold"))
            stack.wait("cached weights", lambda stack=stack: _is_kept(stack.log, ranks))
            memory |= {f"{name}, cold": used for name, used in stack.memory().items() if name.startswith("rank")}
        with stack_of(scratch, str(model), cache, options) as stack:
            found.append(measure_start(stack, "cached"))
            found += [measure_kill(stack) for _ in range(kills)]
            memory |= stack.memory()
            kv_bytes = sum(int(line["kv_bytes"]) for line in stack.log.of("rank_loaded")[:ranks])
        for file in cache.rglob("*"):
            if file.is_file():
                file.unlink()
    return found, memory, kv_bytes


def _is_kept(log: Log, ranks: int) -> bool:
    """Whether every rank's weights are, or will not be."""
    return len(log.of("weights_kept") + log.of("weight_cache_write_failed")) >= ranks or bool(
        log.of("computing_with_pytorch")
    )


def parts(report: StartReport) -> Iterator[Sheet | str]:
    for kind in dict.fromkeys(one.kind for one in report.rounds):
        rounds = [one for one in report.rounds if one.kind == kind]
        rows = [
            (name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}")
            for name, seconds in phases_of(rounds).items()
        ]
        yield Sheet((f"{kind}, seconds", "median", "least"), rows, f"{len(rounds)} rounds")
    memory = [(name, *(f"{size / 1e6:.0f}" for size in sizes)) for name, sizes in report.memory.items()]
    yield Sheet(("memory, MB", "PSS", "USS", "peak RSS"), memory)
    held = sum(sizes[0] for name, sizes in report.memory.items() if _is_executors(name))
    yield (
        f"The executor's processes hold {held / 1e6:.0f} MB (PSS): {report.model_bytes / 1e6:.0f} of weights' files "
        f"and up to {report.kv_bytes / 1e6:.0f} of KV cache among them."
    )
    yield f"Model: {report.model}, {report.model_bytes / 1e6:.0f} MB."


def _is_executors(name: str) -> bool:
    return name.startswith(("executor", "rank")) and not name.endswith(", cold")


def main(
    model: Annotated[
        Path, typer.Option(help="A model directory or a .gguf file; `ryzanstein models list` shows where one is.")
    ],
    random: Annotated[
        str,
        typer.Option(
            help="Instead, with the tokenizer of --model: a random Llama of this shape, as hidden,heads,kv_heads,inner,"
            "layers,vocabulary, or 1.1b."
        ),
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks.", min=1)] = 1,
    rounds: Rounds = 3,
    kills: Annotated[int, typer.Option(help="Kills of a rank in each round.", min=0)] = 2,
    json: JsonFile = None,
) -> None:
    """Start of a stack, and return of a ring whose rank was killed."""
    if not model.exists():
        raise typer.BadParameter(f"There is no {model}.")
    with TemporaryDirectory(prefix="ryzanstein-bench-") as name:
        scratch, directory = Path(name), model
        if random:
            write_servable(scratch / "random", shape_option(random), directory)
            directory = scratch / "random"
        found, memory, kv_bytes = measure(scratch, directory.resolve(), rounds, kills, ["--tp", str(tp)], tp)
        report = StartReport(
            **about(),
            model=directory.name,
            model_bytes=weight_bytes(directory),
            kv_bytes=kv_bytes,
            rounds=found,
            memory=memory,
        )
    publish(report, *parts(report), json=json)


if __name__ == "__main__":
    run(main)
