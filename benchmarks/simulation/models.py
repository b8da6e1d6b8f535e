"""Placement of models in a large cluster, in virtual time: `python -m benchmarks.simulation.models --help`.

The scheduler's own placement decides for a thousand hosts which of them loads which model; LRU, static placement and
one that knows the future get the very same requests.

Hits: requests that have a place at once. Cold: requests that come while no group serves their model. First token: 0.2 s
and the time until there is a place. Decision: CPU time of a pass over hosts and models.
"""

import gc
import math
import operator
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from benchmarks.harness import (
    Jobs,
    JsonFile,
    Report,
    Seed,
    Sheet,
    about,
    in_processes,
    nearest,
    one_of,
    publish,
    run,
)
from benchmarks.simulation.virtual_hosts import (
    FIRST_TOKEN,
    MOST,
    SERVICE,
    SLOTS,
    Group,
    Host,
    Policy,
    Scale,
    Yard,
)
from services.scheduler.models.cluster import ClusterView
from services.scheduler.models.demand import DemandTracker
from services.scheduler.models.placement import Command, ModelPlacer
from shared.errors import ModelDoesNotFit
from shared.messages import (
    GroupLoad,
    GroupRecord,
    HostBeat,
    HostModel,
    HostRecord,
    LoadModel,
    ModelSpec,
    SchedulerDemand,
    WaitingModel,
)

TARGET = 0.75
"""Share of places that LRU and static placement plan for, as ours does."""
BEGIN = 1_700_000_000.0
PASSES = 10
"""Of ours in a second, at most, where one does not do everything: fewer than a scheduler makes."""


def planned(yard: Yard) -> list[int]:
    """Loads, before anything happens, what the first requests need; returns the replicas of each model."""
    memory = 0.9 * sum(host.memory for host in yard.hosts)
    needed = [_replicas(rate) for rate in yard.rates()]
    while any(n > 1 for n in needed) and sum(map(operator.mul, needed, yard.sizes)) > memory:
        needed = [max(1, int(n * 0.95)) for n in needed]
    for model in sorted(range(len(needed)), key=lambda model: -yard.sizes[model]):
        for _ in range(needed[model]):
            host = max(yard.hosts, key=lambda host: host.free)
            if host.free >= yard.sizes[model]:
                yard.load(model, host, warm=True)
    return needed


def _replicas(rate: float) -> int:
    return max(1, math.ceil(rate * SERVICE / (TARGET * SLOTS)))


class Ours:
    """The scheduler's placement, told what heartbeats would tell: loads are up to two seconds old."""

    def begin(self, yard: Yard) -> None:
        self._specs = {str(model): ModelSpec(str(model), "", most=MOST) for model in range(yard.scale.models)}
        self._view = ClusterView()
        self._placer = ModelPlacer(self._view)
        self._demand = DemandTracker()
        self._arrived = [0] * yard.scale.models
        self._known: set[str] = set()
        self._changed = set(range(len(yard.hosts)))
        planned(yard)
        self._view.keep(dict.fromkeys(self._specs, ""))
        for host in yard.hosts:
            self._beat(yard, host)

    def decide(self, yard: Yard) -> None:
        now = BEGIN + yard.now
        for number in self._changed:
            self._beat(yard, yard.hosts[number])
        self._changed.clear()
        self._tell_groups(yard, now)
        models = []
        for model, arrived in enumerate(yard.arrivals):
            self._arrived[model] += int(arrived)
            queue = yard.waiting[model]
            oldest = yard.now - queue[0][0] if queue else 0.0
            if self._arrived[model]:
                idle = yard.now - yard.asked_at[model]
                models.append(
                    WaitingModel(str(model), yard.queued[model], oldest, self._arrived[model], idle)
                )
        self._demand.report(SchedulerDemand("s", models), now)
        for _ in range(PASSES):
            began = time.process_time()
            decisions = self._placer.decide(self._specs, self._demand.all(now), now)
            yard.measured.decided.append(time.process_time() - began)
            self._obey(yard, decisions.commands)
            if not decisions.more:
                break
        yard.cordoned = frozenset(name for said in decisions.placements.values() for name in said.cordoned)

    def _obey(self, yard: Yard, commands: Sequence[Command]) -> None:
        for command in commands:
            host, told = yard.hosts[int(command.host)], command.command
            self._changed.add(host.number)
            if isinstance(told, LoadModel) and host.free < yard.sizes[int(command.model)]:
                self._placer.refused(command, ModelDoesNotFit.code, yard.sizes[int(command.model)], "")
            elif isinstance(told, LoadModel):
                yard.load(int(command.model), host, name=told.group)
            elif told.group in host.groups:
                yard.unload(host.groups[told.group])

    def _tell_groups(self, yard: Yard, now: float) -> None:
        there: set[str] = set()
        turn = int(yard.now) % 2
        for model, groups in enumerate(yard.groups):
            size = yard.sizes[model]
            for group in groups.values():
                there.add(group.name)
                starting = group.ready_at > yard.now
                if group.name in self._known and group.place % 2 != turn and not group.draining:
                    continue
                state = "draining" if group.draining else "starting" if starting else "ready"
                load = GroupLoad(running=int(yard.running[group.place]), slots=SLOTS)
                record = GroupRecord(group.name, str(model), state, 1, [], load, str(group.host), memory=size)  # type: ignore[arg-type]
                self._view.group(record, now)
        for name in self._known - there:
            self._changed.add(int(name.split("/")[0]))
            self._view.forget_group(name)
        self._known = there
        for number in self._changed:
            self._beat(yard, yard.hosts[number])

    def _beat(self, yard: Yard, host: Host) -> None:
        models = [
            HostModel(
                str(model),
                "sleeping" if model in host.asleep else "stored",
                memory=yard.sizes[model],
                load_seconds=host.load_seconds[model],
            )
            for model in host.stored
        ]
        beat = HostBeat(host.memory, host.memory - host.free, 8, models, takes_models=True)
        self._view.host(HostRecord(str(host.number), beat, "ready"))


class _Usual:
    """Replicas by the same rule as ours; `room` differs."""

    def begin(self, yard: Yard) -> None:
        planned(yard)

    def decide(self, yard: Yard) -> None:
        for model in range(yard.scale.models):
            if not yard.queued[model] and not yard.arrivals[model]:
                continue
            groups = yard.groups[model].values()
            running = sum(int(yard.running[group.place]) for group in groups)
            needed = min(MOST, math.ceil((running + yard.queued[model]) / (TARGET * SLOTS)))
            for _ in range(min(needed, max(1, 2 * len(groups))) - len(groups)):
                if not self.add(yard, model):
                    break

    def add(self, yard: Yard, model: int) -> bool:
        raise NotImplementedError


class Lru(_Usual):
    """As llama.cpp's router and Ollama have it, over many hosts: the least recently used that nobody uses make room."""

    def add(self, yard: Yard, model: int) -> bool:
        size = yard.sizes[model]
        free = max(yard.hosts, key=lambda host: host.free)
        if free.free >= size:
            yard.load(model, free)
            return True
        best: tuple[float, Host, list[Group]] | None = None
        for host in yard.hosts:
            if host.memory < size:
                continue
            idle = [
                g for g in host.groups.values() if yard.idle(g) and not g.draining and g.ready_at <= yard.now
            ]
            going, freed = [], host.free
            for group in sorted(idle, key=lambda group: group.used_at):
                if freed >= size:
                    break
                going.append(group)
                freed += yard.sizes[group.model]
            if freed >= size and (best is None or going[-1].used_at < best[0]):
                best = going[-1].used_at, host, going
        if best is None:
            return False
        for group in best[2]:
            yard.unload(group)
        yard.load(model, best[1])
        return True


class Static:
    """Each model has replicas in proportion to what is asked of it at the beginning, and no other ever."""

    def begin(self, yard: Yard) -> None:
        needed = planned(yard)
        self._fill(yard, needed)

    def _fill(self, yard: Yard, needed: list[int]) -> None:
        """What memory is left goes to the models with the most requests per replica."""
        rates = yard.rates()
        while True:
            free = max(yard.hosts, key=lambda host: host.free)
            fitting = [model for model, size in enumerate(yard.sizes) if size <= free.free]
            if not fitting or free.free < 0.05 * free.memory:
                return
            model = max(fitting, key=lambda model: rates[model] / needed[model])
            needed[model] += 1
            yard.load(model, free, warm=True)

    def decide(self, yard: Yard) -> None: ...


class Foresight:
    """Knows the rates of all the time to come, loads before they rise, and unloads what is needed last, as Bélády has
    it. What is left to wait for is chance, and memory that is full: about the best that any placement could reach."""

    LEAD = 240
    """Seconds before a change of rates at which it begins to load: longer than any load takes."""

    def begin(self, yard: Yard) -> None:
        planned(yard)
        told = yard.foretell()
        self._begins = [second for second, _ in told]
        self._needed = [[_replicas(rate) for rate in rates] for _, rates in told]

    def decide(self, yard: Yard) -> None:
        now = bisect_right(self._begins, yard.now) - 1
        soon = bisect_right(self._begins, yard.now + self.LEAD) - 1
        wanted = [max(needed) for needed in zip(*self._needed[now : soon + 1], strict=True)]
        have = [sum(not group.draining for group in groups.values()) for groups in yard.groups]
        for model in sorted(range(len(wanted)), key=lambda model: have[model] / max(1, wanted[model])):
            for _ in range(wanted[model] - have[model]):
                if not self._load(yard, model):
                    self._make_room(yard, model, wanted, have, now)
                    break

    def _load(self, yard: Yard, model: int) -> bool:
        size = yard.sizes[model]
        fitting = [host for host in yard.hosts if host.free >= size]
        if fitting:
            yard.load(
                model, min(fitting, key=lambda host: (model not in host.asleep, model not in host.stored))
            )
        return bool(fitting)

    def _make_room(self, yard: Yard, model: int, wanted: list[int], have: list[int], now: int) -> None:
        """On the first host where groups suffice that are not needed soon, those first that are needed last."""
        for host in yard.hosts:
            going: list[Group] = []
            freed = host.free + sum(
                yard.sizes[group.model] for group in host.groups.values() if group.draining
            )
            spare = [g for g in host.groups.values() if not g.draining and have[g.model] > wanted[g.model]]
            for group in sorted(spare, key=lambda group: -self._needed_at(group.model, have, now)):
                if freed >= yard.sizes[model]:
                    break
                freed += yard.sizes[group.model]
                going.append(group)
            if freed >= yard.sizes[model] and host.memory >= yard.sizes[model]:
                for group in going:
                    have[group.model] -= 1
                    yard.unload(group)
                return

    def _needed_at(self, model: int, have: list[int], now: int) -> float:
        """The second at which all of its replicas are needed again."""
        later = range(now, len(self._begins))
        return next((self._begins[at] for at in later if self._needed[at][model] >= have[model]), math.inf)


POLICIES: dict[str, type[Policy]] = {"ours": Ours, "lru": Lru, "static": Static, "foresight": Foresight}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's figures. Times in seconds, shares from 0 to 1."""

    policy: str
    skew: float
    requests: int
    hits: float
    cold: float
    given_up: float
    loads_per_hour: float
    first_token_p50: float
    first_token_p99: float
    decision_p50: float
    decision_p99: float
    seconds: float
    """Real time of the run."""


class PlacementReport(Report, frozen=True, kw_only=True):
    seed: int
    scale: Scale
    results: list[Result]


def simulate(policy: str, scale: Scale, seed: int) -> Result:
    """One policy's run."""
    began = time.perf_counter()
    yard = Yard(scale, seed)
    gc.disable()
    try:
        measured = yard.run(POLICIES[policy]())
    finally:
        gc.enable()
    waits, counts = list(measured.waits), list(measured.waits.values())
    total = max(1, sum(counts))
    return Result(
        policy=policy,
        skew=scale.skew,
        requests=measured.arrived,
        hits=measured.hits / total,
        cold=measured.cold / max(1, measured.arrived),
        given_up=measured.given_up / total,
        loads_per_hour=measured.loads * 3600 / scale.seconds,
        first_token_p50=FIRST_TOKEN + nearest(waits, 0.5, counts),
        first_token_p99=FIRST_TOKEN + nearest(waits, 0.99, counts),
        decision_p50=nearest(measured.decided, 0.5),
        decision_p99=nearest(measured.decided, 0.99),
        seconds=time.perf_counter() - began,
    )


def parts(report: PlacementReport) -> list[Sheet | str]:
    rows = [
        (
            *(f"{one.skew:g}", one.policy, f"{one.hits:.2%}", f"{one.cold:.3%}", f"{one.given_up:.3%}"),
            *(f"{one.loads_per_hour:,.0f}", f"{one.first_token_p50:.1f}/{one.first_token_p99:.1f}"),
            f"{one.decision_p50 * 1e3:.1f}/{one.decision_p99 * 1e3:.1f}" if one.decision_p50 else "",
        )
        for one in report.results
    ]
    head = (
        *("exponent", "policy", "hits", "cold", "given up", "loads/h"),
        *("first token p50/p99 s", "decision p50/p99 ms"),
    )
    scale = report.scale
    said = (
        f"{scale.hosts:,} hosts, {scale.models:,} models, load {scale.load:.0%}, popularity changes every "
        f"{scale.drift} s, {scale.seconds:,} s after {scale.warm_up:,} s; {report.results[0].requests:,} requests, "
        f"seed {report.seed}."
    )
    return [Sheet(head, rows, left=("policy",)), said]


def main(
    hosts: Annotated[int, typer.Option(help="Hosts, of 80 to 640 GB.", min=1)] = 1000,
    models: Annotated[int, typer.Option(help="Models, of 1 to 140 GB.", min=2)] = 300,
    skew: Annotated[list[float] | None, typer.Option(help="Zipf exponent; may be repeated.")] = None,
    load: Annotated[float, typer.Option(help="Share of all memory that is needed.", min=0.01, max=2.0)] = 0.6,
    seconds: Annotated[int, typer.Option(help="Seconds that are measured.", min=1)] = 3600,
    warm_up: Annotated[int, typer.Option(help="Seconds before them.", min=0)] = 900,
    drift: Annotated[int, typer.Option(help="Seconds between changes of popularity; 0: none.", min=0)] = 300,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Only this one of: {', '.join(POLICIES)}. May be repeated.")
    ] = None,
    jobs: Jobs = 1,
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Hits, loads and times to first token of the placement of models, against LRU and static placement."""
    names = one_of("--policy", policy or POLICIES, POLICIES)
    scales = [
        Scale(hosts, models, exponent, load, seconds, warm_up, drift) for exponent in skew or [0.8, 1.0, 1.2]
    ]
    results = in_processes(simulate, [(name, scale, seed) for scale in scales for name in names], jobs)
    report = PlacementReport(**about(), seed=seed, scale=scales[0], results=results)
    publish(report, *parts(report), json=json)


if __name__ == "__main__":
    run(main)
