"""What is measured: each ratio is two ways to do the same work, in turns, round by round, against recorded ratios.

    round    1        2        3
             A B      B A      A B  ...       one ratio per round; the machine is the same for both halves of it

    better ◀──────────── recorded ───┬─ margin ─┬─ 3 standard errors of both medians ─▶ worse: a regression

A family of ratios shares what takes long to load, and has a process to itself (`__main__.py` starts it).
"""

import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from benchmarks.control_plane.load_client import http_request
from benchmarks.control_plane.systems import HOST, Ours
from benchmarks.engine.in_process import InProcess, set_threads
from benchmarks.errors import BenchError
from benchmarks.harness import CORES, timed
from benchmarks.processes import cpu_seconds
from benchmarks.serve.workloads import Workload

MARGIN = 0.05  # of a ratio: a change that is smaller is not worth an alarm
ERRORS = 3.0  # standard errors that noise may make; of five measures in a thousand runs one is so far off
MIN_ROUNDS = 3  # rounds without which nothing is judged

Better = Literal["more", "less"]
Verdict = Literal["equal", "better", "worse", "not recorded"]


class Ratio(msgspec.Struct, frozen=True):
    """A ratio as it was measured in several rounds."""

    median: float
    # Standard deviation of one round, by the median absolute deviation: one disturbed round changes nothing.
    spread: float
    rounds: int

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Ratio":
        """Raises ValueError where there are too few rounds, or one is no ratio."""
        if len(rounds) < MIN_ROUNDS or not all(0 < one < math.inf for one in rounds):
            raise ValueError(f"A ratio needs {MIN_ROUNDS} rounds or more, each above 0; there are {list(rounds)}.")
        median = statistics.median(rounds)
        deviation = statistics.median(abs(one - median) for one in rounds)
        return cls(median, 1.4826 * deviation, len(rounds))

    @property
    def error(self) -> float:
        """Standard error of the median."""
        return 1.2533 * self.spread / math.sqrt(self.rounds)


class Recorded(msgspec.Struct, frozen=True):
    """What `--record` writes."""

    commit: str
    date: str
    machine: str  # ratios of another kind of machine are told, and decide nothing
    ratios: dict[str, Ratio]

    def is_of(self, machine: str) -> bool:
        """Whether it was recorded on a machine of that kind: processor and cores."""
        return self.machine.split(", ")[:2] == machine.split(", ")[:2]


class Finding(msgspec.Struct, frozen=True):
    """One ratio against the one that was recorded."""

    name: str
    now: Ratio
    before: Ratio | None
    limit: float | None  # beyond this it is worse
    verdict: Verdict


def compare(now: Mapping[str, Ratio], before: Mapping[str, Ratio], better: Mapping[str, Better]) -> list[Finding]:
    """Every ratio of this run; `better`: whether more of it is good."""
    return [_compare(name, ratio, before.get(name), better[name]) for name, ratio in now.items()]


def _compare(name: str, now: Ratio, before: Ratio | None, better: Better) -> Finding:
    if before is None:
        return Finding(name, now, None, None, "not recorded")
    slack = MARGIN * before.median + ERRORS * math.hypot(now.error, before.error)
    sign = 1 if better == "more" else -1
    gained = sign * (now.median - before.median)
    verdict: Verdict = "worse" if gained < -slack else "better" if gained > slack else "equal"
    return Finding(name, now, before, before.median - sign * slack, verdict)


def left_out(now: Mapping[str, Ratio], before: Mapping[str, Ratio]) -> list[str]:
    """Ratios that were recorded and not measured: a measure that broke must not pass for a good one."""
    return sorted(set(before) - set(now))


Rounds = dict[str, list[float]]  # a ratio's value in each round


class Pair(NamedTuple):
    """Two ways; what each returns is its cost (seconds, of whatever kind) for the same work."""

    name: str
    first: Callable[[], float]
    second: Callable[[], float]


# Every ratio, (cost of the second) / (cost of the first), and whether more of it is good.
BETTER: dict[str, Better] = {
    "native kernels, speed of a decode step against PyTorch": "more",
    "native kernels, speed of a prefill against PyTorch": "more",
    "int8 blocks, time of a decode step against bf16": "less",
    "int8 blocks, time of a decode step at 32,768 tokens against 1,024": "less",
    "bf16 weights, speed of a product of 64 rows against PyTorch": "more",
    "int8 weights, speed of a product of 64 rows against bf16": "more",
    "q8_0 weights, speed of a product of 64 rows against bf16": "more",
    "q6_k weights, speed of a product of 64 rows against bf16": "more",
    "q4_k weights, speed of a product of 64 rows against bf16": "more",
    "int4 weights, speed of a product of 64 rows against bf16": "more",
    "q4_k weights, speed of a product of 1 row against bf16": "more",
    "grammar, time of a decode step against none": "less",
    "2 ranks, speed of a decode step against 1": "more",
    "2 ranks, speed of a prefill against 1": "more",
    "served, tokens/s against in-process, 1 at a time": "more",
    "served, tokens/s against in-process, 32 at once": "more",
    "gateway, CPU of a token against the executor's": "less",
    "gRPC, CPU of a streamed answer against REST": "less",
}


def ratios(pairs: list[Pair], rounds: int) -> Rounds:
    """After a round that does not count."""
    found: Rounds = {pair.name: [] for pair in pairs}
    for at in range(rounds + 1):
        for pair in pairs:
            costs = {way: way() for way in (pair.first, pair.second)[:: -1 if at % 2 else 1]}
            if at:
                found[pair.name].append(costs[pair.second] / costs[pair.first])
    return found


# --- the engine ----------------------------------------------------------------------------------


def engine(model: Path, rounds: int, effort: int) -> Rounds:
    """`effort`: steps of a round, and tokens of a text, are as many times 8."""
    threads = CORES
    return ratios([*_kernels(model, threads, effort), *_blocks(model, threads, effort)], rounds) | _grammar(
        model, threads, rounds, effort
    )


def _kernels(model: Path, threads: int, effort: int) -> Iterator[Pair]:
    from benchmarks.engine.__main__ import GREEDY, make_step
    from services.executor.native import library

    if library.load_library() is None:
        return  # this machine has no native kernels: PyTorch would be held against itself
    native = make_step(model, "bf16", threads)
    os.environ[library.DISABLE] = "0"
    library.why_not.cache_clear()
    try:
        plain = make_step(model, "bf16", threads)
    finally:
        del os.environ[library.DISABLE]
        library.why_not.cache_clear()
    assert native.spent is not None, "the kernels compute"
    assert plain.spent is None, "PyTorch computes"
    from benchmarks.engine.steps import Decode, Prefill

    for kind, steps, times in (("decode step", Decode(8, 128), 2), ("prefill", Prefill(64), 1)):
        plans = steps.steps(1024, 0)
        for stepper in (native, plain):
            stepper.prepare(plans)
        ours, theirs = (
            timed(partial(stepper.step, plans.measured, GREEDY), times * effort) for stepper in (native, plain)
        )
        yield Pair(f"native kernels, speed of a {kind} against PyTorch", ours, theirs)


def _blocks(model: Path, threads: int, effort: int) -> Iterator[Pair]:
    from benchmarks.engine.kv_decode import make_step
    from benchmarks.engine.steps import decode_plan

    plan = decode_plan(8, 1024)
    bf16, int8 = (make_step(model, kind, threads, 8 * 64) for kind in ("bf16", "int8"))
    yield Pair(
        "int8 blocks, time of a decode step against bf16",
        timed(lambda: bf16(plan), 4 * effort),
        timed(lambda: int8(plan), 4 * effort),
    )


def _grammar(model: Path, threads: int, rounds: int, effort: int) -> Rounds:
    from benchmarks.engine.structured import CASES, bench_of

    name = "grammar, time of a decode step against none"
    with bench_of(model, "bf16", threads) as bench:

        def decode(case: str) -> Callable[[], float]:
            return lambda: bench.decode(CASES[case], 8, 8 * effort)[0]

        return ratios([Pair(name, decode("free, greedy"), decode("JSON, greedy"))], rounds)


# --- rings ---------------------------------------------------------------------------------------


def ring(model: Path, rounds: int, effort: int) -> Rounds:
    """Two ranks of one thread against one rank of one thread."""
    from benchmarks.engine.steps import Decode, Prefill
    from benchmarks.ring import BenchRing

    settings: dict[str, object] = {"model": str(model), "dtype": "bf16", "device": "cpu", "kv_dtype": "auto"}
    one, two = BenchRing(settings, 1), BenchRing(settings, 2)
    try:
        found: Rounds = {}
        for kind, steps in (("decode step", Decode(16, 320)), ("prefill", Prefill(256))):
            plans = one.begin(steps), two.begin(steps)
            pair = Pair(
                f"2 ranks, speed of a {kind} against 1",
                lambda plan=plans[1]: sum(two.steps(plan, 2 * effort)[0]),  # type: ignore[misc]
                lambda plan=plans[0]: sum(one.steps(plan, 2 * effort)[0]),  # type: ignore[misc]
            )
            found |= ratios([pair], rounds)
        return found
    finally:
        one.close()
        two.close()


ONE = Workload("one", clients=1, requests=2, prompt_tokens=128, output_tokens=64)
STREAMS = 160  # answers of each turn that CPU time is taken of
MANY = Workload("many", clients=32, requests=64, prompt_tokens=64, output_tokens=32)


def served(model: Path, rounds: int, effort: int) -> Rounds:
    """A server's tokens/s over those of the same engine in this process, with the same shapes."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-perf-") as scratch:
        return asyncio.run(_served(model, rounds, effort, Path(scratch)))


async def _served(model: Path, rounds: int, effort: int, scratch: Path) -> Rounds:
    threads = CORES
    set_threads(threads)
    ours = Ours(scratch / "stack", model=model, engine="torch")
    await ours.start()
    try:
        here = InProcess(model, scratch, threads)
        source = random.Random(2)  # prompts are new each time, there as here: the cache would keep them
        found: Rounds = {}
        for name, workload in (("1 at a time", ONE), ("32 at once", MANY)):
            sized = workload.resized(requests=workload.requests * effort)
            rates = found[f"served, tokens/s against in-process, {name}"] = []
            for at in range(rounds + 1):
                there = await _rate(ours.port, sized, source) if at % 2 else 0.0
                alone = await asyncio.to_thread(here.rate, sized)
                there = there or await _rate(ours.port, sized, source)
                if at:
                    rates.append(there / alone)
        return found
    finally:
        await ours.stop()


async def _rate(port: int, workload: Workload, source: random.Random) -> float:
    """Tokens/s of a closed loop that streams; prompts are token ids, so that both ways compute the same."""
    left = [
        _request(port, [source.randrange(100, 40_000) for _ in range(workload.prompt_tokens)], workload)
        for _ in range(workload.requests)
    ]

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
        while left:
            writer.write(left.pop())
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            if b'"completion_tokens":%d' % workload.output_tokens not in answer:
                raise BenchError(f"The server's answer is not the one that was measured: {answer[-600:]!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(workload.clients)))
    return workload.requests * workload.output_tokens / (time.perf_counter() - began)


def _request(port: int, prompt: list[int], workload: Workload) -> bytes:
    fields = {
        "model": "stub",
        "prompt": prompt,
        "max_tokens": workload.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return http_request(HOST, port, msgspec.json.encode(fields), "/v1/completions")


def services(model: Path, rounds: int, effort: int) -> Rounds:
    """CPU time of services on the stub engine: the gateway's over the executor's, and gRPC's over REST's."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-perf-") as scratch:
        return asyncio.run(_services(rounds, effort, Path(scratch)))


async def _services(rounds: int, effort: int, scratch: Path) -> Rounds:
    from benchmarks.gateway.grpc_rest import CLIENTS

    tokens, loops, requests = 128, 16, STREAMS * effort
    ours = Ours(scratch, grpc=True)
    await ours.start()
    shares: list[float] = []
    apis: list[float] = []
    try:
        async with CLIENTS["rest raw"](ours, loops) as rest, CLIENTS["grpc raw"](ours, loops) as grpc:
            for at in range(rounds + 1):
                ways = [rest, grpc] if at % 2 else [grpc, rest]
                spent = {ask: await _cpu(ours, ask, tokens, loops, requests) for ask in ways}
                if at:
                    shares.append(spent[rest]["gateway"] / spent[rest]["executor"])
                    apis.append(spent[grpc]["gateway"] / spent[rest]["gateway"])
    finally:
        await ours.stop()
    return {
        "gateway, CPU of a token against the executor's": shares,
        "gRPC, CPU of a streamed answer against REST": apis,
    }


async def _cpu(
    ours: Ours, ask: Callable[[int, bool], Awaitable[int]], tokens: int, loops: int, requests: int
) -> dict[str, float]:
    """CPU seconds of each service for so many streamed answers."""
    processes = ours.processes()
    before = cpu_seconds(processes)

    async def loop() -> None:
        for _ in range(requests // loops):
            await ask(tokens, True)

    await asyncio.gather(*(loop() for _ in range(loops)))
    after = cpu_seconds(processes)
    return {name: after[name] - before[name] for name in processes}
