"""The runs of a benchmark: a closed loop, open loops, steps of known length; and systems that end with their block."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from benchmarks.control_plane.load_client import MARK_RATE, Added, Load, Measured, compiled, drive, holds
from benchmarks.control_plane.systems import HOST, System
from benchmarks.errors import BenchError
from benchmarks.harness import turns
from benchmarks.processes import cpu_seconds
from benchmarks.serve.stats import Spread

WARM_UP = 1.5
OPEN_CONNECTIONS = 1024
Tell = Callable[[str], None]


class Bench:
    """The measurements, one after the other. `tell` is told what is going on."""

    def __init__(self, folder: Path, tokens: int, connections: int, seconds: float, tell: Tell) -> None:
        self._program = compiled(folder)
        self._tokens = tokens
        self._connections = connections
        self._seconds = seconds
        self._tell = tell
        self._runs = 0

    async def measure(
        self, system: System, *, rate: float = 0.0, seconds: float = 0.0, tokens: int = 0, connections: int = 0
    ) -> Measured:
        """One run: a closed loop, or an open one at `rate`; 0: as the bench has it."""
        self._runs += 1
        tokens = tokens or self._tokens
        load = Load(
            host=HOST,
            port=system.port,
            request=system.request(tokens),
            tokens=tokens,
            text=system.text(tokens),
            connections=OPEN_CONNECTIONS if rate else connections or self._connections,
            rate=rate,
            seconds=seconds or self._seconds,
            seed=self._runs,
        )
        before = cpu_seconds(system.processes())
        figures = await asyncio.to_thread(drive, self._program, load)
        after = cpu_seconds(system.processes())
        right = max(1, figures.requests - sum(figures.faults.values()))
        cpu = {name: (after[name] - before[name]) * 1e3 / right for name in after}
        cpu["client"] = figures.client_cpu_seconds * 1e3 / right
        return Measured(system=system.name, figures=figures, cpu_ms=cpu)

    async def warm_up(self, system: System) -> None:
        self._tell(f"{system.name}: warming up")
        await self.measure(system, seconds=WARM_UP)

    async def idle(self, system: System, seconds: float) -> dict[str, float]:
        """CPU milliseconds a second by process, after as long in which nobody has asked anything."""
        self._tell(f"{system.name}: left alone")
        await asyncio.sleep(seconds)
        before = cpu_seconds(system.processes())
        await asyncio.sleep(seconds)
        after = cpu_seconds(system.processes())
        return {name: (after[name] - before[name]) * 1e3 / seconds for name in before}

    async def closed(self, systems: Sequence[System], rounds: int) -> dict[str, list[Measured]]:
        """Systems take turns, so that what disturbs the machine disturbs all."""
        found: dict[str, list[Measured]] = {system.name: [] for system in systems}
        for at, system in turns(systems, rounds):
            self._tell(f"{system.name}: {self._connections} at once, round {at + 1} of {rounds}")
            found[system.name].append(await self.measure(system))
        return found

    async def at_mark(self, system: System, limit_ms: float) -> Measured:
        """The open loop at the rate of the mark; once more where the first one has not held."""
        self._tell(f"{system.name}: open loop at {MARK_RATE:.0f} requests/s")
        found = await self.measure(system, rate=MARK_RATE)
        return found if holds(found, limit_ms) else await self.measure(system, rate=MARK_RATE)

    async def added(self, system: System, step_ms: float, streams: int) -> Added:
        """Poisson arrivals at the rate that keeps `streams` open, each with as many tokens as fill a second."""
        tokens = max(2, round(1000 / step_ms))
        rate = streams / ((tokens + 0.5) * step_ms / 1e3)
        self._tell(f"{system.name}: {streams} streams at {step_ms:g} ms a step")
        await self.measure(system, rate=rate, seconds=WARM_UP, tokens=tokens)
        found = await self.measure(system, rate=rate, seconds=max(self._seconds, 4.0), tokens=tokens)
        first, token, whole = found.figures.first_ms, found.figures.token_ms, found.figures.whole_ms
        if not found.figures.clean or first is None or token is None or whole is None:
            raise BenchError(f"The run at a set speed failed: {found.figures.faults}.")
        return Added(
            step_ms=step_ms,
            streams=rate * whole.p50 / 1e3,
            first_token_ms=Spread(first.p50 - 1.5 * step_ms, first.p99 - 1.5 * step_ms),
            token_ms=Spread(token.p50 - step_ms, token.p99 - step_ms),
            cpu_us_per_token={part: cpu * 1e3 / tokens for part, cpu in found.cpu_ms.items()},
        )


@contextlib.asynccontextmanager
async def running(systems: Sequence[System], tell: Tell) -> AsyncIterator[None]:
    """Starts the systems, and ends them whatever happens."""
    begun: list[System] = []
    try:
        for system in systems:
            tell(f"{system.name}: starting")
            begun.append(system)
            await system.start()
        yield
    finally:
        for system in begun:
            await system.stop()
