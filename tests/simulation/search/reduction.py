"""Makes a schedule that fails as short as it can be made, by running shorter ones. Pure: `fails` runs them.

    faults ──▶ clients ──▶ their requests, times, steps and parameters ──▶ again, until nothing more can go

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from tests.simulation.faults.schedule import ClientPlan, Fault, Schedule

Fails = Callable[[Schedule], bool]
T = TypeVar("T")
SHORTEST = 0.05  # seconds, and other numbers of a fault, that are not halved any more


class OutOfRuns(Exception):
    """As many runs have been made as were allowed."""


class Reduction:
    def __init__(self, fails: Fails, most_runs: int, told: Callable[[Schedule, int], None] | None = None) -> None:
        self._fails, self._most = fails, most_runs
        self._told = told
        self._known: dict[bytes, bool] = {}
        self.runs = 0
        self.best: Schedule | None = None

    def reduce(self, schedule: Schedule) -> Schedule:
        """The shortest that was found. `schedule` itself must fail."""
        self.best = schedule
        try:
            while True:
                before = self.best
                self._shorten()
                if self.best == before:
                    return self.best
        except OutOfRuns:
            return self.best

    def _shorten(self) -> None:
        at = self._current
        ddmin(at().faults, lambda some: self._try(faults=some))
        ddmin(at().clients, lambda some: self._try(clients=some))
        for number in range(len(at().faults)):
            while any(
                self._try(faults=_with(at().faults, number, simpler)) for simpler in simpler_faults(at().faults[number])
            ):
                """Each simpler one may have a simpler one yet."""
        for number in range(len(at().clients)):
            while any(
                self._try(clients=_with(at().clients, number, simpler))
                for simpler in simpler_clients(at().clients[number])
            ):
                """As above."""
        if _last(at()) < at().duration:
            self._try(duration=_last(at()))

    def _current(self) -> Schedule:
        assert self.best is not None  # set by `reduce`
        return self.best

    def _try(self, **changes: object) -> bool:
        candidate = msgspec.structs.replace(self._current(), **changes)
        key = msgspec.msgpack.encode(candidate)
        if key not in self._known:
            if self.runs >= self._most:
                raise OutOfRuns
            self.runs += 1
            self._known[key] = self._fails(candidate)
        if self._known[key]:
            self.best = candidate
            if self._told is not None:
                self._told(candidate, self.runs)
        return self._known[key]


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Some of `items`, in their order, of which none can be left out by itself: without it nothing fails."""
    items, parts = list(items), 2
    if items and fails([]):
        return []
    while len(items) >= 2:
        for chunk in _chunks(len(items), parts):
            rest = [item for at, item in enumerate(items) if at not in chunk]
            if fails(rest):
                items, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(items):
                return items
            parts = min(len(items), parts * 2)
    return items


def _chunks(count: int, parts: int) -> Iterator[range]:
    parts = min(count, parts)
    for part in range(parts):
        yield range(part * count // parts, (part + 1) * count // parts)


def simpler_faults(fault: Fault) -> Iterator[Fault]:
    """Each in one respect, the greatest step first."""
    replace = msgspec.structs.replace
    if fault.steps:
        yield replace(fault, steps=0)
        yield replace(fault, steps=fault.steps // 2)
    if fault.lasts > SHORTEST:
        yield replace(fault, lasts=round(fault.lasts / 2, 3))
    for digits in (0, 1):
        if round(fault.at, digits) != fault.at:
            yield replace(fault, at=round(fault.at, digits))
    for name, value in fault.parameters.items():
        if isinstance(value, float) and abs(value) > SHORTEST:
            yield replace(fault, parameters={**fault.parameters, name: 0.0})
            yield replace(fault, parameters={**fault.parameters, name: round(value / 2, 3)})


def simpler_clients(plan: ClientPlan) -> Iterator[ClientPlan]:
    replace = msgspec.structs.replace
    for requests in sorted({1, plan.requests // 2, plan.requests - 1}):
        if 1 <= requests < plan.requests:
            yield replace(plan, requests=requests)
    for at in (0.0, float(round(plan.at))):
        if at != plan.at:
            yield replace(plan, at=at)


def _with(items: Sequence[T], number: int, item: T) -> list[T]:
    return [*items[:number], item, *items[number + 1 :]]


def _last(schedule: Schedule) -> float:
    """When the last client has begun and the last fault is over."""
    return max([schedule.ends(), *(plan.at for plan in schedule.clients), 1.0])
