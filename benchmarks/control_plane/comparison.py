"""Two checkouts of this repository in one run: rounds alternate, and what counts is the ratio within a round.

Each stack is started by the checkout's own `systems.Ours`, in a process of its own: neither is started by code of the
other. Absolute figures of a shared machine change from minute to minute; ratios of neighbouring runs do not.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.control_plane.idle import Idle
from benchmarks.control_plane.load_client import Added, Measured
from benchmarks.control_plane.systems import READY_SECONDS, Ours
from benchmarks.errors import BenchError
from benchmarks.harness import Report, Sheet
from benchmarks.processes import Child
from benchmarks.serve.stats import Spread

_SERVE = """
import asyncio, json, sys
from pathlib import Path
from benchmarks.control_plane.systems import Ours

async def serve(folder, model, step_ms):
    system = Ours(Path(folder), model=Path(model) if model else None, step_ms=step_ms)
    try:
        await system.start()
        print(json.dumps([system.port, system.processes()]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await system.stop()

asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


Run = TypeVar("Run")


class Checkout(Ours):
    """The stack of the checkout in `root`; its requests and what they must answer are those of this one."""

    def __init__(self, name: str, root: Path, folder: Path, *, model: Path | None, step_ms: float) -> None:
        """Raises `BenchError` where `root` has no such benchmark."""
        super().__init__(folder, model=model, step_ms=step_ms)
        if not (root / "benchmarks" / "control_plane" / "systems.py").is_file():
            raise BenchError(f"{root} is no checkout of this repository; name the directory of one.")
        self.name = name
        arguments = [str(folder), str(model or ""), str(step_ms)]
        self._child = Child(f"The stack of {root}", [sys.executable, "-c", _SERVE, *arguments], root=root)
        self._served: Mapping[str, list[int]] = {}

    async def start(self) -> None:
        self.port, self._served = json.loads(await self._child.start())

    async def stop(self) -> None:
        await self._child.stop(READY_SECONDS)

    def processes(self) -> Mapping[str, list[int]]:
        return self._served


class Comparison(Report, frozen=True, kw_only=True):
    """Rounds of both: this checkout's run first, then the other's. Written as it is by `--json`."""

    here: str
    there: str
    """Directories of the checkouts."""
    tokens: int
    connections: int
    closed: list[tuple[Measured, Measured]]
    added: list[tuple[Added, Added]]
    idle: list[tuple[Idle, Idle]] = []

    @property
    def clean(self) -> bool:
        return all(run.figures.clean for pair in self.closed for run in pair)

    def parts(self) -> list[Sheet | str]:
        """A row for each figure, the ratio last."""
        rows = [
            (
                one.name,
                f"{one.here:,.2f}",
                f"{one.there:,.2f}",
                "-" if one.ratio is None else f"{one.ratio:.3f}",
            )
            for one in compared(self)
        ]
        rounds = max(len(self.closed), len(self.added))
        return [
            Sheet(("figure", "here", "there", "ratio"), rows),
            f"here: {self.here}; there: {self.there}; {rounds} rounds, in turns.",
        ]


class Figure(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    here: float
    there: float
    """Medians over the rounds."""
    ratio: float | None
    """Median of the rounds' ratios, here to there; None where a round has nothing to divide by."""


def compared(comparison: Comparison) -> list[Figure]:
    """Every figure of both workloads, and of none; the client's CPU time is left out."""
    found: list[Figure] = []
    if pairs := comparison.closed:
        load = f"{comparison.connections} at once x {comparison.tokens}"
        found.append(_figure(f"{load}: requests/s", pairs, lambda run: run.figures.requests_per_second))
        found += _spreads(f"{load}: whole ms", pairs, lambda run: run.figures.whole_ms)
        found += _cpu(
            f"{load}: CPU us per request", [tuple(_us(run.cpu_ms) for run in pair) for pair in pairs]
        )
    if steps := comparison.added:
        load = f"set speed, {steps[0][0].step_ms:g} ms a step"
        found += _spreads(f"{load}: first token, added ms", steps, lambda run: run.first_token_ms)
        found += _spreads(f"{load}: next token, added ms", steps, lambda run: run.token_ms)
        found += _cpu(
            f"{load}: CPU us per token", [tuple(run.cpu_us_per_token for run in pair) for pair in steps]
        )
    if comparison.idle:
        found += _cpu(
            "idle: CPU ms a second", [tuple(run.cpu_ms for run in pair) for pair in comparison.idle]
        )
        found += _cpu(
            "idle: wake-ups a second", [tuple(run.wake_ups for run in pair) for pair in comparison.idle]
        )
    return found


def _figure(name: str, pairs: Sequence[tuple[Run, ...]], value: Callable[[Run], float]) -> Figure:
    here = [value(pair[0]) for pair in pairs]
    there = [value(pair[1]) for pair in pairs]
    ratio = (
        statistics.median(one / other for one, other in zip(here, there, strict=True))
        if min(there) > 0
        else None
    )
    return Figure(name, statistics.median(here), statistics.median(there), ratio)


def _spreads(
    name: str, pairs: Sequence[tuple[Run, ...]], value: Callable[[Run], Spread | None]
) -> list[Figure]:
    def of(share: str) -> Callable[[Run], float]:
        return lambda run: 0.0 if (spread := value(run)) is None else getattr(spread, share)

    return [_figure(f"{name}, {share}", pairs, of(share)) for share in ("p50", "p99")]


def _cpu(name: str, pairs: Sequence[tuple[Mapping[str, float], ...]]) -> list[Figure]:
    parts = [part for part in pairs[0][0] if part != "client"]
    whole = _figure(name, pairs, lambda run: sum(us for part, us in run.items() if part != "client"))
    return [
        whole,
        *(_figure(f"    {part}", pairs, lambda run, part=part: run.get(part, 0.0)) for part in parts),
    ]


def _us(cpu_ms: Mapping[str, float]) -> dict[str, float]:
    return {part: ms * 1e3 for part, ms in cpu_ms.items()}
