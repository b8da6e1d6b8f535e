"""Two models and room for one, in virtual time: requests that alternate wait for a load and no more, and where those
for both are mixed no model is thrown out for one that comes back at once."""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from services.scheduler.models.cluster import ClusterView
from services.scheduler.models.demand import DemandTracker
from services.scheduler.models.eviction import BUSY_STAY, FIRST_TURN, RESIDENCE
from services.scheduler.models.placement import ModelPlacer
from shared.messages import (
    GroupLoad,
    GroupRecord,
    HostBeat,
    HostModel,
    HostRecord,
    LoadModel,
    SchedulerDemand,
    WaitingModel,
)
from tests.unit.scheduler.models.hosts import BEGIN, GB, spec

TICK, UNLOAD = 0.05, 0.2
NAMES = ("one", "two")


@dataclass
class Group:
    name: str
    model: str
    ready_at: float
    ends: list[float] = field(default_factory=list)  # when what runs in it will have ended
    gone_at: float = 0.0  # when it may go; 0: it was not told to
    cordoned: bool = False


class OneHost:
    """Its records are told every `TICK`; so is what waits."""

    def __init__(self, load: float, service: float) -> None:
        self.load, self.service = load, service
        self.now = BEGIN
        self.view = ClusterView()
        self.placer = ModelPlacer(self.view)
        self.demand = DemandTracker()
        self.specs = {name: spec(name) for name in NAMES}
        self.group: Group | None = None
        self.queue: list[tuple[float, str]] = []
        self.arrived, self.last = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, BEGIN)
        self.waits: list[float] = []  # seconds from each request to its place
        self.loads = 0

    def ask(self, model: str) -> None:
        self.queue.append((self.now, model))
        self.arrived[model] += 1
        self.last[model] = self.now

    def step(self) -> None:
        self.now += TICK
        self._work()
        self._tell()
        decisions = self.placer.decide(self.specs, self.demand.all(self.now), self.now)
        if self.group is not None:
            self.group.cordoned = self.group.name in decisions.placements[self.group.model].cordoned
        for command in decisions.commands:
            if isinstance(command.command, LoadModel):
                assert self.group is None, "memory is exceeded"
                self.loads += 1
                self.group = Group(command.command.group, command.model, self.now + self.load)
            elif self.group is not None:
                self.group.gone_at = self.now + UNLOAD

    def _work(self) -> None:
        group = self.group
        if group is None:
            return
        group.ends = [end for end in group.ends if end > self.now]
        if group.gone_at and self.now >= group.gone_at and not group.ends:
            self.view.forget_group(group.name)
            self.group = None
        elif self.now >= group.ready_at and not group.gone_at and not group.cordoned:
            for at, model in [item for item in self.queue if item[1] == group.model]:
                self.queue.remove((at, model))
                self.waits.append(self.now - at)
                group.ends.append(self.now + self.service)

    def _tell(self) -> None:
        group = self.group
        models = [HostModel(name, "stored", memory=6 * GB, load_seconds=self.load) for name in NAMES]
        beat = HostBeat(10 * GB, 6 * GB if group else 0, 0, models, takes_models=True)
        self.view.host(HostRecord("h", beat, "ready"))
        if group is not None:
            state = "draining" if group.gone_at else "ready" if self.now >= group.ready_at else "starting"
            load = GroupLoad(running=len(group.ends), slots=8)
            self.view.group(
                GroupRecord(group.name, group.model, state, 1, [], load, "h", memory=6 * GB),  # type: ignore[arg-type]
                self.now,
            )
        self.demand.report(SchedulerDemand("s", list(self._waiting())), self.now)

    def _waiting(self) -> Iterator[WaitingModel]:
        for name in NAMES:
            since = [at for at, model in self.queue if model == name]
            oldest = self.now - since[0] if since else 0.0
            yield WaitingModel(name, len(since), oldest, self.arrived[name], self.now - self.last[name])

    def idle(self) -> bool:
        return not self.queue and (self.group is None or not self.group.ends)


@pytest.mark.parametrize("load", [0.7, 10.0])
def test_where_requests_alternate_each_waits_for_one_load(load: float) -> None:
    host = OneHost(load, service=0.7)
    for number in range(8):
        host.ask(NAMES[number % 2])
        host.step()
        while not host.idle():
            host.step()
    assert host.loads == 8
    assert max(host.waits) < load + UNLOAD + FIRST_TURN + 4 * TICK


def mixed(host: OneHost, requests: int, seed: int) -> None:
    """Mixed: 0.8 requests a second, three of ten are for another model than the last."""
    generator = random.Random(seed)
    at, model = host.now, 0
    for _ in range(requests):
        while host.now < at:
            host.step()
        host.ask(NAMES[model])
        at += generator.expovariate(0.8)
        model = 1 - model if generator.random() < 0.3 else model
    while not host.idle():
        host.step()


def test_where_requests_are_mixed_most_find_their_model_loaded() -> None:
    host = OneHost(0.7, service=0.7)
    mixed(host, 300, seed=1)
    assert len(host.waits) == 300
    assert statistics.median(host.waits) <= 0.1
    assert statistics.fmean(host.waits) < 1.0
    assert sorted(host.waits)[296] < 3.5
    assert host.loads < 100


def test_what_is_dear_to_load_is_waited_for_three_loads_at_most() -> None:
    host = OneHost(20.0, service=1.0)
    mixed(host, 300, seed=2)
    assert len(host.waits) == 300
    assert statistics.fmean(host.waits) < 1.2 * host.load
    assert max(host.waits) < 3 * (host.load + UNLOAD + FIRST_TURN)


def test_where_both_always_have_work_most_of_the_time_is_spent_on_it() -> None:
    host = OneHost(5.0, service=10.0)
    mixed(host, 300, seed=3)
    assert host.loads * host.load < 0.25 * (host.now - BEGIN)
    assert max(host.waits) < (BUSY_STAY * RESIDENCE + 3) * host.load + 2 * host.service
