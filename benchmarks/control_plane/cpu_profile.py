"""Where a request's and a token's CPU time goes: every process of the stack by function, under both workloads.

    CPU time of a process        its clock, over a run that nothing else disturbs
      in the kernel / outside    its user and system times
        outside, by group        py-spy's samples of it, a process at a time while the same load runs

A sample belongs to the innermost frame that says whose work it is: `free` of libc inside of msgspec inside of
`streams/run.py` is msgspec's. Samples within a system call are dropped, as py-spy cannot tell work from waiting there:
the kernel's share is the system time. Of nats-server, which is no Python, there is that alone.
"""

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.control_plane.bench import Bench, Tell, running, steady
from benchmarks.control_plane.load_client import Measured
from benchmarks.control_plane.systems import Ours, System
from benchmarks.errors import BenchError
from benchmarks.harness import Report, Sheet
from benchmarks.process_cpu import cpu_seconds

KERNEL, COLLECTOR, UNKNOWN = "kernel", "garbage collector", "other"
RATE = 200
"""Samples per second of each process."""
BEGIN_SECONDS = 4.0
"""That py-spy takes to read a process's symbols before its first sample, at most."""
BEYOND, ATTEMPTS = 2.0, 3
"""py-spy at times takes a thread that waits for one that runs: where there are this many times more samples than the
process's clock allows, they are taken again."""
TOP = 12
"""Functions of each process that the report names."""

_COLLECTING = re.compile(
    r"^(gc_collect|deduce_unreachable|move_unreachable|subtract_refs|update_refs|delete_garbage)"
)
_WAITING = re.compile(
    r"^(PyThread_acquire_lock_timed|take_gil|pthread_cond_|sem_|_*futex|epoll_|p?poll$|select|clock_nanosleep|nanosleep"
    r"|read|write|recv|send|accept|getpid|getrandom|getrlimit|madvise|mmap|munmap|brk|close|__?syscall|syscall)"
)
_GROUPS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "logs, metrics, traces",
            r"^(structlog|prometheus_client|opentelemetry)/|^shared/(service|tracing|otlp)\b",
        ),
        ("MessagePack, JSON", r"^msgspec/|^json/|_pickle\.c"),
        ("tokenizer", r"^tokenizers/"),
        ("chat template", r"^jinja2/|^<template>"),
        ("HTTP", r"^(uvicorn|httptools|h11|starlette)/|^llhttp"),
        ("NATS client", r"^nats/"),
        (
            "event loop",
            r"^(asyncio|uvloop|concurrent/futures)/|_asynciomodule\.c|_queuemodule\.c"
            r"|^(loop|core|stream|linux|loop-watcher|async|timer|queue|heap-inl|poll|tcp|unix)\.[ch]\b",
        ),
        ("arrays", r"^numpy/"),
    )
)
_OURS = re.compile(r"^(services/[^/]+/[^/.]+|shared/[^/.]+)")
_FRAME = re.compile(r"^(?P<function>.*) \((?P<where>[^()]*)\)$")

Stack = Sequence[str]
"""Frames as py-spy writes them, `function (file:line)`, the innermost last."""


# --- samples to groups: pure ---------------------------------------------------------------------


def stacks(raw: str) -> list[tuple[Stack, int]]:
    """Of py-spy's format `raw`: frames with semicolons between them, and how often they were seen. A thread's name
    or a process's may stand first; it is no frame."""
    found = []
    for line in raw.splitlines():
        frames, _, count = line.rpartition(" ")
        if count.isdigit():
            found.append((frames.split(";"), int(count)))
    return found


def _split(frame: str) -> tuple[str, str]:
    match = _FRAME.match(frame)
    return (match["function"], match["where"]) if match else (frame, "")


def group_of(stack: Stack) -> str:
    """Whose work a sample is."""
    frames = [_split(frame) for frame in reversed(stack)]
    if _in_kernel(frames):
        return KERNEL
    if any(_COLLECTING.match(function) for function, _ in frames):
        return COLLECTOR
    for _, where in frames:
        for name, pattern in _GROUPS:
            if pattern.search(where):
                return name
        if (ours := _OURS.match(where)) is not None:
            return ours[1]
    return UNKNOWN


def _in_kernel(frames: Iterable[tuple[str, str]]) -> bool:
    """Whether the innermost frames, which libc has no names for at times, are those of a system call."""
    for function, where in frames:
        if _WAITING.match(function) and not where.endswith(".py") and ".py:" not in where:
            return True
        if not where.startswith(("libc", "libpthread", "[vdso]")):
            return False
    return False


def function_of(stack: Stack) -> str:
    """The innermost function of Python, without the line: where one would look."""
    for frame in reversed(stack):
        function, where = _split(frame)
        path, _, _ = where.partition(":")
        if path.endswith(".py"):
            return f"{function} ({path})"
    return UNKNOWN


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process, or those of one service."""

    cpu_us: float
    """Per request or token."""
    kernel: float
    """Share of it that the kernel took."""
    samples: int
    """Outside of the kernel."""
    groups: dict[str, float]
    """Shares of `cpu_us`, `kernel` among them; together 1. Without samples `kernel` and `other`."""
    functions: dict[str, float]
    """The largest, as shares of `cpu_us`."""


def part_of(samples: Iterable[tuple[Stack, int]], cpu_us: float, kernel: float) -> Part:
    """Shares of a process's CPU time, from its samples and the kernel's share of it (0 to 1)."""
    groups: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack, count in samples:
        group = group_of(stack)
        if group != KERNEL:
            groups[group] += count
            functions[function_of(stack)] += count
    taken = groups.total()
    outside = (1.0 - kernel) / max(1, taken)
    shares = {name: count * outside for name, count in groups.most_common()} or {UNKNOWN: 1.0 - kernel}
    return Part(
        cpu_us=cpu_us,
        kernel=kernel,
        samples=taken,
        groups={KERNEL: kernel, **shares},
        functions={name: count * outside for name, count in functions.most_common(TOP)},
    )


def plausible(samples: Iterable[tuple[Stack, int]], cpu_seconds: float) -> bool:
    """Whether a process that took so much CPU time meanwhile can have been seen at work so often."""
    running = sum(count for stack, count in samples if group_of(stack) != KERNEL)
    return running <= BEYOND * RATE * cpu_seconds + RATE / 10


# --- taking the samples --------------------------------------------------------------------------


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One load, every process under it."""

    name: str
    unit: str
    """Of what `cpu_us` is the cost: `request` or `token`."""
    parts: dict[str, Part]


class Profile(Report, frozen=True, kw_only=True):
    workloads: list[Workload]
    clean = True

    def parts(self) -> Iterator[Sheet | str]:
        """A table for each workload: groups down, processes across; then each process's largest functions."""
        for one in self.workloads:
            parts = one.parts
            rows = [
                ("all", *(f"{part.cpu_us:,.1f}" for part in parts.values())),
                *(
                    (name, *(_cell(part, name) for part in parts.values()))
                    for name in _ordered(parts.values())
                ),
                ("samples", *(f"{part.samples:,}" for part in parts.values())),
            ]
            yield Sheet((f"us per {one.unit} (share)", *parts), rows, one.name)
            for name, part in parts.items():
                if part.functions:
                    yield f"{name}: " + ", ".join(
                        f"{each} {share:.1%}" for each, share in part.functions.items()
                    )


def py_spy() -> str:
    """The program. Raises `BenchError` where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    found = shutil.which("py-spy") or (str(beside) if beside.exists() else None)
    if found is None:
        raise BenchError("The profile needs py-spy, which is not installed; `pip install py-spy` brings it.")
    return found


async def sample(program: str, pid: int, seconds: float, scratch: Path) -> list[tuple[Stack, int]]:
    """Stacks of a process that is not idle. Raises `BenchError` where py-spy may not read it."""
    output = scratch / f"{pid}.stacks"
    arguments = ["record", "--native", "--format", "raw", "--rate", str(RATE), "--duration", f"{seconds:.0f}"]
    done = await asyncio.to_thread(
        subprocess.run,
        [program, *arguments, "--pid", str(pid), "--output", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    if not output.exists():
        raise BenchError(f"py-spy cannot sample process {pid}: {(done.stderr + done.stdout).strip()[-300:]}")
    return stacks(output.read_text())


def kernel_seconds(processes: Mapping[str, Iterable[int]]) -> dict[str, tuple[float, float]]:
    """System seconds so far, and all; by the names of `processes`."""
    found = {}
    for name, pids in processes.items():
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        system = sum(each.system for each in times)
        found[name] = (system, system + sum(each.user for each in times))
    return found


class Profiler:
    """One system, the loads of `bench`."""

    def __init__(self, bench: Bench, seconds: float, tell: Tell) -> None:
        """`seconds`: for which each process is sampled. Raises `BenchError` without py-spy."""
        self._program = py_spy()
        self._bench = bench
        self._seconds = seconds
        self._tell = tell

    async def workload(self, name: str, system: System, *, rate: float = 0.0, tokens: int = 0) -> Workload:
        """`rate` and `tokens` as of `Bench.measure`; with a rate the costs are those of a token."""
        processes = system.processes()
        self._tell(f"{name}: CPU time")
        before = kernel_seconds(processes)
        alone = await self._bench.measure(system, rate=rate, tokens=tokens, seconds=self._seconds)
        after = kernel_seconds(processes)
        parts = {}
        with tempfile.TemporaryDirectory() as scratch:
            for part, pids in processes.items():
                cpu_us = alone.cpu_ms[part] * 1e3 / (tokens if rate else 1)
                system_time, whole = (after[part][at] - before[part][at] for at in (0, 1))
                self._tell(f"{name}: sampling {part}")
                found = await self._sampled(part, pids, system, Path(scratch), rate, tokens)
                parts[part] = part_of(found, cpu_us, system_time / whole if whole else 0.0)
        return Workload(name=name, unit="token" if rate else "request", parts=parts)

    async def _sampled(
        self, part: str, pids: Sequence[int], system: System, scratch: Path, rate: float, tokens: int
    ) -> list[tuple[Stack, int]]:
        """One service's processes at a time: each sampled process is stopped for every sample."""
        if part == "nats":
            return []
        seconds = self._seconds + BEGIN_SECONDS
        for _ in range(ATTEMPTS):
            before = cpu_seconds({part: pids})[part]
            load: asyncio.Task[Measured]
            async with asyncio.TaskGroup() as group:
                load = group.create_task(
                    self._bench.measure(system, rate=rate, tokens=tokens, seconds=seconds)
                )
                samples = [
                    group.create_task(sample(self._program, pid, self._seconds, scratch)) for pid in pids
                ]
            if not load.result().figures.requests:
                raise BenchError(f"Nothing was answered while {part} was sampled.")
            found = [each for task in samples for each in task.result()]
            if plausible(found, cpu_seconds({part: pids})[part] - before):
                return found
        raise BenchError(f"py-spy saw {part} run for longer than it did; try again, on a machine less busy.")


async def profile(
    bench: Bench,
    folder: Path,
    model: Path | None,
    step_ms: float,
    streams: int,
    seconds: float,
    tell: Tell,
) -> list[Workload]:
    """Both workloads: `streams` at once without delay, and at `step_ms` (0: left out). Raises `BenchError`."""
    profiler = Profiler(bench, seconds, tell)
    found = []
    fast = Ours(folder / "stack", model=model)
    async with running([fast], tell):
        await bench.warm_up(fast)
        found.append(await profiler.workload(f"{streams} at once", fast))
    if step_ms:
        slow = Ours(folder / "stack-slow", model=model, step_ms=step_ms)
        tokens, rate = steady(step_ms, streams)
        async with running([slow], tell):
            await bench.warm_up(slow)
            name = f"{streams} streams at {step_ms:g} ms a step"
            found.append(await profiler.workload(name, slow, rate=rate, tokens=tokens))
    return found


def _cell(part: Part, group: str) -> str:
    share = part.groups.get(group, 0.0)
    return f"{share * part.cpu_us:,.1f} ({share:.1%})" if share else "-"


def _ordered(parts: Iterable[Part]) -> list[str]:
    """Groups, those that cost the most over all processes first."""
    cost: Counter[str] = Counter()
    for part in parts:
        for group, share in part.groups.items():
            cost[group] += share * part.cpu_us  # type: ignore[assignment]  # a Counter of floats
    return [group for group, _ in cost.most_common()]
