"""What is measured: each ratio is two ways to do the same work, in turns, round by round.

    round    1        2        3
             A B      B A      A B  ...       one ratio per round; the machine is the same for both halves of it

A family of ratios shares what takes long to load, and has a process to itself (`__main__.py` starts it).
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.regressions.comparing import Better

Rounds = dict[str, list[float]]
"""A ratio's value in each round."""


class Pair(NamedTuple):
    """Two ways; what each returns is its cost (seconds, of whatever kind) for the same work."""

    name: str
    better: Better
    """Whether more of (cost of the second) / (cost of the first) is good."""
    first: Callable[[], float]
    second: Callable[[], float]


BETTER: dict[str, Better] = {
    "native kernels, speed of a decode step against PyTorch": "more",
    "native kernels, speed of a prefill against PyTorch": "more",
    "int8 blocks, time of a decode step against bf16": "less",
    "grammar, time of a decode step against none": "less",
    "2 ranks, speed of a decode step against 1": "more",
    "2 ranks, speed of a prefill against 1": "more",
    "served, tokens/s against in-process, 1 at a time": "more",
    "served, tokens/s against in-process, 32 at once": "more",
    "gateway, CPU of a token against the executor's": "less",
    "gRPC, CPU of a streamed answer against REST": "less",
}
"""Every ratio, and whether more of it is good."""


def in_turns(pairs: list[Pair], rounds: int) -> Rounds:
    """After a round that does not count."""
    found: Rounds = {pair.name: [] for pair in pairs}
    for at in range(rounds + 1):
        for pair in pairs:
            if at % 2:
                second, first = pair.second(), pair.first()
            else:
                first, second = pair.first(), pair.second()
            if at:
                found[pair.name].append(second / first)
    return found


def _pair(name: str, first: Callable[[], float], second: Callable[[], float]) -> Pair:
    return Pair(name, BETTER[name], first, second)


def timed(work: Callable[[], object], times: int) -> Callable[[], float]:
    """Seconds of `work`, done several times."""

    def run() -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()
        return time.perf_counter() - began

    return run


# --- the engine ----------------------------------------------------------------------------------


def engine(model: Path, rounds: int, effort: int) -> Rounds:
    """`effort`: steps of a round, and tokens of a text, are as many times 8."""
    threads = len(os.sched_getaffinity(0))
    return in_turns([*_kernels(model, threads, effort), *_blocks(model, threads, effort)], rounds) | _grammar(
        model, threads, rounds, effort
    )


def _kernels(model: Path, threads: int, effort: int) -> Iterator[Pair]:
    from benchmarks.engine.__main__ import make_step
    from services.executor.native import library

    if library.load_library() is None:
        return  # this machine has no native kernels: PyTorch would be held against itself
    native = make_step(model, "bf16", threads)
    os.environ[library.DISABLE] = "0"
    for known in (library.why_not, library.load_library):
        known.cache_clear()
    try:
        plain = make_step(model, "bf16", threads)
    finally:
        del os.environ[library.DISABLE]
        for known in (library.why_not, library.load_library):
            known.cache_clear()
    assert native.spent is not None, "the kernels compute"
    assert plain.spent is None, "PyTorch computes"
    from benchmarks.engine.steps import Decode, Prefill

    for kind, steps, times in (("decode step", Decode(8, 128), 2), ("prefill", Prefill(64), 1)):
        plans = steps.steps(1024, 0)
        for stepper in (native, plain):
            stepper.prepare(plans)
        ours = timed(lambda plan=plans.measured: native.step(plan), times * effort)  # type: ignore[misc]
        theirs = timed(lambda plan=plans.measured: plain.step(plan), times * effort)  # type: ignore[misc]
        yield _pair(f"native kernels, speed of a {kind} against PyTorch", ours, theirs)


def _blocks(model: Path, threads: int, effort: int) -> Iterator[Pair]:
    from benchmarks.engine.kv_decode import make_step
    from benchmarks.engine.steps import decode_plan

    plan = decode_plan(8, 1024)
    bf16, int8 = (make_step(model, kind, threads, 8 * 64) for kind in ("bf16", "int8"))  # type: ignore[arg-type]
    yield _pair(
        "int8 blocks, time of a decode step against bf16",
        timed(lambda: bf16(plan), 4 * effort),
        timed(lambda: int8(plan), 4 * effort),
    )


def _grammar(model: Path, threads: int, rounds: int, effort: int) -> Rounds:
    from benchmarks.engine.speculation import make_execute
    from benchmarks.engine.structured import CASES, Bench, vocabulary_of
    from services.executor.structured_output.compiler import GrammarWork
    from services.executor.structured_output.state import Vocabulary

    execute, spec = make_execute(model, "bf16", threads)
    card, bundle = vocabulary_of(model, spec)
    work = GrammarWork()
    work.load(card, bundle)
    bench = Bench(execute, spec, Vocabulary.of(card, bundle), work)

    def decode(case: str) -> Callable[[], float]:
        return lambda: bench.decode(CASES[case], 8, 8 * effort)[0]

    try:
        pair = _pair(
            "grammar, time of a decode step against none", decode("free, greedy"), decode("JSON, greedy")
        )
        return in_turns([pair], rounds)
    finally:
        bench.compiler.close()
        work.close()


# --- rings ---------------------------------------------------------------------------------------


def ring(model: Path, rounds: int, effort: int) -> Rounds:
    """Two ranks of one thread against one rank of one thread."""
    from benchmarks.engine.steps import Decode, Prefill
    from benchmarks.ring.ranks import BenchRing

    settings: dict[str, object] = {"model": str(model), "dtype": "bf16", "device": "cpu", "kv_dtype": "auto"}
    one, two = BenchRing(settings, 1), BenchRing(settings, 2)
    try:
        found: Rounds = {}
        for kind, steps in (("decode step", Decode(16, 320)), ("prefill", Prefill(256))):
            plans = one.begin(steps), two.begin(steps)
            pair = _pair(
                f"2 ranks, speed of a {kind} against 1",
                lambda plan=plans[1]: sum(two.steps(plan, 2 * effort)[0]),  # type: ignore[misc]
                lambda plan=plans[0]: sum(one.steps(plan, 2 * effort)[0]),  # type: ignore[misc]
            )
            found |= in_turns([pair], rounds)
        return found
    finally:
        one.close()
        two.close()
