"""One run: a world from a seed, a system in it, faults and clients by the schedule, and what is broken at the end."""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.simulation.core.loop import Stuck
from tests.simulation.core.world import World
from tests.simulation.faults.injection import Happened, Injection
from tests.simulation.faults.schedule import ClientPlan, Schedule, Unusable
from tests.simulation.faults.system import System
from tests.simulation.scenarios.scenario import Scenario
from tests.simulation.systems.outcome import Broken, Outcome
from tests.simulation.systems.transitions import Transitions


class Subject(System, Protocol):
    """A system with clients and promises."""

    requests: int

    async def start(self) -> None:
        """Until it is ready."""

    async def serve(self, plans: Sequence[ClientPlan]) -> None:
        """Until the last client is through."""

    async def settle(self) -> None:
        """Once faults and clients are over: what must become free gets its time."""

    def broken(self, happened: Sequence[Happened], *, whole: bool) -> list[Broken]:
        """At the end. `whole`: everything has ended and settled."""


Build = Callable[[World, Scenario, Schedule, Transitions], Subject]


class Run:
    """May be run once. `world` keeps its record afterwards."""

    def __init__(self, scenario: Scenario, schedule: Schedule, *, story: bool = False) -> None:
        self._scenario, self._schedule = scenario, schedule
        self.world = World(schedule.seed)
        self.world.trace.keep(story)
        self._transitions = Transitions()
        self._build = build_of(scenario.system)
        self._injection: Injection | None = None

    def run(self) -> Outcome:
        began = time.process_time()
        broken, subject = [], None
        try:
            subject = self._build(self.world, self._scenario, self._schedule, self._transitions)
            self.world.run(self._all(subject))
        except Stuck as stuck:
            broken.append(Broken("liveness", f"Nothing goes on: {stuck}."))
        except TimeoutError:
            broken.append(Broken("liveness", f"Not everything had ended at {self.world.now:.3f} s, {self._late}."))
        except Unusable:
            raise
        except Exception as error:  # a run that breaks is a finding, and the search goes on
            told = "".join(traceback.format_exception(error)[-3:]).strip()
            broken.append(Broken("no_error", f"{type(error).__name__}: {error}\n{told}"))
        happened = self._injection.happened if self._injection is not None else []
        if subject is not None:
            broken.extend(subject.broken(happened, whole=not broken))
        return Outcome(
            self._schedule,
            self.world.trace.digest(),
            self.world.now,
            time.process_time() - began,
            broken,
            self._transitions.seen(),
            Counter(one.fault.fault for one in happened),
            subject.requests if subject is not None else 0,
        )

    @property
    def _late(self) -> str:
        return f"{self._scenario.settle:.0f} s after faults and clients had begun for the last time"

    async def _all(self, subject: Subject) -> None:
        await subject.start()
        self._injection = injection = Injection(subject, self._schedule.faults)
        self._transitions.faults = lambda: +injection.active
        limit = max(self._schedule.duration, self._schedule.ends()) + self._scenario.settle
        async with asyncio.timeout(limit):
            await asyncio.gather(injection.run(self.world.now), subject.serve(self._schedule.clients))
            await subject.settle()


def build_of(system: str) -> Build:
    """Imports what it needs, services too: after `machine.install()`."""
    if system == "counter":
        from tests.simulation.systems.counter import Counter

        return Counter
    from tests.simulation.deployment import install

    install()
    from tests.simulation.systems.control_plane import ControlPlane

    return ControlPlane
