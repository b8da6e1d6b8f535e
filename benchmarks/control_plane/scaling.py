"""How the control plane scales, as far as few cores show it, and what follows from that for more of them.

    alone     a kind of process on a core that nothing of the stack shares with it: what it can take in
    several   more gateways and schedulers, with a ring and the same load for each gateway, in turns with the stack of
              one of each: what a request costs then
    model     the CPU times of both in `benchmarks.simulation.virtual_processes`: requests/s and latencies of more
              processes, each on a core of its own; held to what was measured on the cores that there are

A process that needs less than its core is slowed down until it is the one that all others wait for: programs that
compute share its core, and the system gives each as much. Requests/s over the share that it got is what it can take.
"""

import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from benchmarks.control_plane.bench import Bench, Tell, running
from benchmarks.control_plane.load_client import Measured
from benchmarks.control_plane.systems import Ours
from benchmarks.errors import BenchError
from benchmarks.harness import Report, Sheet, about, turns
from benchmarks.simulation.virtual_processes import (
    CLIENT,
    GATEWAY,
    PARTS,
    SCHEDULER,
    Demand,
    Load,
    Processes,
    Shape,
    most,
    rings_for,
)
from shared.process import die_with_parent

FEW_TOKENS = 2
"""Of the requests that tell what a request costs apart from its tokens."""
SHAPES = ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4))
"""Gateways and schedulers, beside one of each."""
QUIET, HALF = 0.1, 0.5
"""Shares of the closed loop's requests/s, for open loops: without queues, and to hold the model to."""
OTHERS_BUSY = 0.5
"""Of their core, while a process is slowed down on its own."""
FULL = 4
"""Times as many requests at once there, so that the process always has some to do."""
READY = 0.85
"""Share of a run in which a process must have had something to do, to be what the others waited for."""
RUN_AT = 0.7
"""Of the most requests/s: where latencies are told; and the most that rings are busy."""


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of process on a core without the rest of the stack."""

    part: str
    others: int
    """Computing programs on its core."""
    requests_per_second: float
    share: float
    """Of its core that it has used."""
    ready: float
    """Share of the time in which it computed or waited for its core."""
    cpu_ms: float
    """Of a request."""

    @property
    def limits(self) -> bool:
        """Whether it was what the others waited for."""
        return self.ready >= READY

    @property
    def whole_core(self) -> float:
        """Requests/s that one core's time is enough for."""
        return 1e3 / self.cpu_ms


class Several(msgspec.Struct, frozen=True, kw_only=True):
    """A stack with several beside the one with one of each; as many rings as gateways."""

    gateways: int
    schedulers: int
    cpu_ms: dict[str, float]
    """Of a request."""
    ratios: dict[str, float]
    """CPU time of a request, to that of the stack with one of each; medians of rounds."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The model on the cores of this machine, and what was measured there."""

    load: str
    measured: tuple[float, float, float]
    model: tuple[float, float, float]
    """Requests/s, 50th and 99th percentile of whole answers in ms."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    gateways: int
    schedulers: int
    rings: int
    most: float
    """Requests/s."""
    bound: str
    """The kind of process that is always busy there."""
    rate: float
    """Requests/s of the latencies: `RUN_AT` of the most."""
    p50_ms: float
    p99_ms: float
    cores: float
    """That all processes use at `rate`."""


class Scaling(Report, frozen=True, kw_only=True):
    tokens: int
    connections: int
    request_ms: dict[str, float]
    token_ms: dict[str, float]
    """CPU time of a request apart from its tokens, and of each token."""
    pause_ms: float
    """What a request waits for that is neither computing nor a queue."""
    alone: list[Alone]
    several: list[Several]
    checks: list[Check]
    predicted: list[Predicted]
    faults: int
    """Wrong responses of all runs."""

    @property
    def clean(self) -> bool:
        return not self.faults

    def parts(self) -> list[Sheet | str]:
        said = (
            f"{self.tokens} tokens a request, {self.connections} at once; {self.pause_ms:.1f} ms of an answer are "
            f"waiting without work; wrong responses: {self.faults}."
        )
        return [_alone(self), _several(self), _checks(self), _predicted(self), said]


class Scale:
    """The measurements, one after the other, and what they come to."""

    def __init__(
        self, bench: Bench, folder: Path, model: Path | None, tokens: int, rounds: int, tell: Tell
    ) -> None:
        self._bench = bench
        self._folder = folder
        self._model = model
        self._tokens = tokens
        self._rounds = rounds
        self._tell = tell
        self._faults = 0

    async def run(self, connections: int) -> Scaling:
        """Raises `BenchError` where there is one core alone."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise BenchError("This takes two cores: one for a process alone, and one for all others.")
        one = self._stack(1, 1)
        async with running([one], self._tell):
            await self._bench.warm_up(one)
            few, whole = await self._costs(one)
            closed = _median(run.figures.requests_per_second for run in whole)
            self._tell("open loops")
            quiet = await self._measure(one, rate=QUIET * closed)
            half = await self._measure(one, rate=HALF * closed)
            demands = _demands(few, whole, self._tokens)
            alone = [await self._alone(one, part, demands, cores, FULL * connections) for part in PARTS]
            several = [await self._several(one, *shape, connections) for shape in SHAPES]
        pause = pause_ms(demands, quiet, self._tokens)
        return Scaling(
            **about(),
            tokens=self._tokens,
            connections=connections,
            request_ms={part: demand.request for part, demand in demands.items()},
            token_ms={part: demand.token for part, demand in demands.items()},
            pause_ms=pause,
            alone=alone,
            several=several,
            checks=self._checks(demands, whole, half, pause, connections, len(cores), HALF * closed),
            predicted=predicted(demands, several, self._tokens, pause),
            faults=self._faults,
        )

    def _stack(self, gateways: int, schedulers: int) -> Ours:
        folder = self._folder / f"stack-{gateways}-{schedulers}"
        counts = {"gateways": gateways, "schedulers": schedulers, "rings": gateways}
        return Ours(folder, model=self._model, **counts)

    async def _measure(
        self, system: Ours, *, rate: float = 0.0, tokens: int = 0, connections: int = 0
    ) -> Measured:
        found = await self._bench.measure(system, rate=rate, tokens=tokens, connections=connections)
        self._faults += sum(found.figures.faults.values())
        return found

    async def _costs(self, one: Ours) -> tuple[list[Measured], list[Measured]]:
        """Closed loops of requests with few tokens and with all of them, in turns."""
        few, whole = list[Measured](), list[Measured]()
        for at in range(self._rounds):
            self._tell(f"one of each, round {at + 1} of {self._rounds}")
            few.append(await self._measure(one, tokens=FEW_TOKENS))
            whole.append(await self._measure(one))
        return few, whole

    async def _alone(
        self, one: Ours, part: str, demands: Mapping[str, Demand], cores: list[int], connections: int
    ) -> Alone:
        self._tell(f"{part} on a core of its own")
        own = demands[part].of(self._tokens)
        rest = sum(demand.of(self._tokens) for demand in demands.values()) - own
        share = min(1.0, OTHERS_BUSY * own / rest)
        others = math.ceil(1 / share) - 1
        pids = one.processes()[part]
        with pinned(one.processes(), part, cores[0], set(cores[1:2])), computing(others, cores[0]):
            began, before = time.monotonic(), ready_seconds(pids)
            runs = [await self._measure(one, connections=connections) for _ in range(self._rounds)]
            ready = (ready_seconds(pids) - before) / (time.monotonic() - began)
        rate = _median(run.figures.requests_per_second for run in runs)
        cpu = _median(run.cpu_ms[part] for run in runs)
        share = _median(run.figures.requests_per_second * run.cpu_ms[part] / 1e3 for run in runs)
        return Alone(
            part=part,
            others=others,
            requests_per_second=rate,
            share=share,
            ready=min(1.0, ready),
            cpu_ms=cpu,
        )

    async def _several(self, one: Ours, gateways: int, schedulers: int, connections: int) -> Several:
        more = self._stack(gateways, schedulers)
        found: dict[str, list[Mapping[str, float]]] = {one.name: [], more.name: []}
        async with running([more], self._tell):
            await self._bench.warm_up(more)
            for at, (system, count) in turns(
                [(one, connections), (more, gateways * connections)], self._rounds
            ):
                self._tell(f"{more.name}: round {at + 1} of {self._rounds}")
                found[system.name].append((await self._measure(system, connections=count)).cpu_ms)
        pairs = list(zip(found[more.name], found[one.name], strict=True))
        return Several(
            gateways=gateways,
            schedulers=schedulers,
            cpu_ms={part: _median(here[part] for here, _ in pairs) for part in PARTS},
            ratios={part: _median(here[part] / there[part] for here, there in pairs) for part in PARTS},
        )

    def _checks(
        self,
        demands: Mapping[str, Demand],
        whole: list[Measured],
        half: Measured,
        pause: float,
        connections: int,
        cores: int,
        rate: float,
    ) -> list[Check]:
        shape = Shape(cores=cores)
        loads = {
            f"{connections} at once": (Load(self._tokens, connections=connections), whole),
            f"open loop, {rate:,.0f} requests/s": (Load(self._tokens, rate=rate, pause_ms=pause), [half]),
        }
        checks = []
        for name, (load, runs) in loads.items():
            found = Processes(demands, shape, load).run()
            columns = zip(*(_figures(run) for run in runs), strict=True)
            rates, p50, p99 = (_median(column) for column in columns)
            model = (found.requests_per_second, found.p50_ms, found.p99_ms)
            checks.append(Check(load=name, measured=(rates, p50, p99), model=model))
        return checks


def _figures(run: Measured) -> tuple[float, float, float]:
    whole = run.figures.whole_ms
    if whole is None:
        raise BenchError(f"No response was right: {run.figures.faults}.")
    return run.figures.requests_per_second, whole.p50, whole.p99


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _demands(few: list[Measured], whole: list[Measured], tokens: int) -> dict[str, Demand]:
    """From requests of `FEW_TOKENS` and of `tokens` tokens: what a request costs, and what a token."""
    found = {}
    for part in (*PARTS, CLIENT):
        little, much = (_median(run.cpu_ms[part] for run in runs) for runs in (few, whole))
        token = max(0.0, (much - little) / (tokens - FEW_TOKENS))
        found[part] = Demand(max(0.0, much - tokens * token), token)
    return found


def pause_ms(demands: Mapping[str, Demand], quiet: Measured, tokens: int) -> float:
    """Of a whole answer where nothing queues, what its own way through the processes does not explain."""
    load = Load(tokens, requests=1000, rate=1.0)
    alone = Processes(demands, Shape(), load).run()
    return max(0.0, _figures(quiet)[1] - alone.p50_ms)


def predicted(
    demands: Mapping[str, Demand], several: list[Several], tokens: int, pause: float
) -> list[Predicted]:
    """One of each, and what was measured of several, each process on a core of its own."""
    shapes = {(1, 1): dict.fromkeys(PARTS, 1.0)}
    shapes |= {(each.gateways, each.schedulers): each.ratios for each in several}
    found = []
    for (gateways, schedulers), ratios in shapes.items():
        costs = {part: demands[part].times(ratios[part]) for part in PARTS}
        shape = Shape(gateways, schedulers)
        shape = Shape(gateways, schedulers, rings_for(costs, shape, tokens, RUN_AT))
        top, bound = most(costs, shape, tokens)
        run = Processes(costs, shape, Load(tokens, rate=RUN_AT * top, pause_ms=pause)).run()
        found.append(
            Predicted(
                gateways=gateways,
                schedulers=schedulers,
                rings=shape.rings,
                most=top,
                bound=bound,
                rate=RUN_AT * top,
                p50_ms=run.p50_ms,
                p99_ms=run.p99_ms,
                cores=sum(run.busy.values()),
            )
        )
    return found


# --- cores -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def pinned(processes: Mapping[str, list[int]], alone: str, core: int, others: set[int]) -> Iterator[None]:
    """The processes `alone` on `core`, all others and this one with what it starts on `others`."""
    before = os.sched_getaffinity(0)
    everyone = [*processes.items(), ("", [os.getpid()])]
    try:
        for name, pids in everyone:
            for pid in pids:
                _keep_on(pid, {core} if name == alone else others)
        yield
    finally:
        for _, pids in everyone:
            for pid in pids:
                _keep_on(pid, before)


def _keep_on(pid: int, cores: set[int]) -> None:
    """All threads; those that they start later stay there too."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)


def ready_seconds(pids: Iterable[int]) -> float:
    """That all threads together have computed or waited for a core, so far; one that has ended counts nothing."""
    nanoseconds = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                nanoseconds += sum(map(int, thread.read_text().split()[:2]))
    return nanoseconds / 1e9


@contextlib.contextmanager
def computing(count: int, core: int) -> Iterator[None]:
    """So many programs that compute without end, on a core."""
    programs = []
    try:
        for _ in range(count):
            command = [sys.executable, "-c", "while True: pass"]
            programs.append(subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent()))
            _keep_on(programs[-1].pid, {core})
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


# --- the report ------------------------------------------------------------------------------------


def _alone(found: Scaling) -> Sheet:
    rows = [
        (
            *(each.part, each.others, f"{each.requests_per_second:,.0f}", f"{each.share:.0%}"),
            *(f"{each.cpu_ms:.3f}", f"{each.whole_core:,.0f}", f"{each.ready:.0%}"),
            "yes" if each.limits else "no",
        )
        for each in found.alone
    ]
    head = (
        *(
            "on a core of its own",
            "programs beside it",
            "requests/s",
            "share of the core",
            "CPU ms a request",
        ),
        *("requests/s of a whole core", "had something to do", "others waited for it"),
    )
    return Sheet(head, rows)


def _several(found: Scaling) -> Sheet:
    costs = (found.request_ms[part] + found.tokens * found.token_ms[part] for part in PARTS)
    rows = [("one of each", *(f"{cost:.3f}" for cost in costs))]
    for each in found.several:
        name = f"{each.gateways} {GATEWAY}s and rings, {each.schedulers} {SCHEDULER}s"
        rows.append((name, *(f"{each.cpu_ms[part]:.3f} ({each.ratios[part]:.2f})" for part in PARTS)))
    return Sheet(("CPU ms a request (to one of each)", *PARTS), rows)


def _checks(found: Scaling) -> Sheet:
    rows = [
        (each.load, *(f"{one[0]:,.0f}, {one[1]:.1f}, {one[2]:.1f}" for one in (each.measured, each.model)))
        for each in found.checks
    ]
    return Sheet(("on this machine's cores: requests/s, p50, p99 in ms", "measured", "model"), rows)


def _predicted(found: Scaling) -> Sheet:
    rows = [
        (
            *(each.gateways, each.schedulers, each.rings, f"{each.most:,.0f}", each.bound),
            *(f"{each.rate:,.0f}", f"{each.p50_ms:.1f} / {each.p99_ms:.1f}", f"{each.cores:.1f}"),
        )
        for each in found.predicted
    ]
    head = (
        *("gateways", "schedulers", "rings", "requests/s at most", "bound", f"at {RUN_AT:.0%}: requests/s"),
        *("p50 / p99 ms", "cores"),
    )
    return Sheet(head, rows, "Model: each process on a core of its own")
