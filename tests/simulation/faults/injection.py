"""Faults happen: each at its time, or at its target's step; what can be undone is undone."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.faults.kinds import kind_of
from tests.simulation.faults.schedule import Fault
from tests.simulation.faults.system import System

STEPS_IN = 1.0  # virtual seconds in which a target must have run its steps; then the fault happens anyway
AFTERMATH = 3.0  # virtual seconds in which what is seen counts as seen under a fault that is over


@dataclass
class Happened:
    """Times are virtual seconds since the world's beginning."""

    fault: Fault
    begun: float
    ended: float = math.inf


class Injection:
    """Runs outside all processes. `active` names the kinds that last now, and those that have just happened."""

    def __init__(self, system: System, faults: Sequence[Fault]) -> None:
        self._system, self._faults = system, faults
        self.active: Counter[str] = Counter()
        self.happened: list[Happened] = []

    async def run(self, began: float) -> None:
        """Until the last one is over. `began`: the virtual time from which the schedule counts."""
        async with asyncio.TaskGroup() as tasks:
            for fault in self._faults:
                tasks.create_task(self._one(fault, began))

    async def _one(self, fault: Fault, began: float) -> None:
        world, kind = self._system.world, kind_of(fault.fault)
        await asyncio.sleep(began + fault.at - world.now)
        process = self._system.process(fault.target) if fault.steps else None
        if process is not None:
            await world.after_steps(process, fault.steps, STEPS_IN)
        self.active[kind.name] += 1
        self._tell(fault, kind.story)
        happened = Happened(fault, world.now)
        self.happened.append(happened)
        await kind.act(self._system, fault)
        if kind.undo is not None:
            await asyncio.sleep(fault.lasts)
            self._tell(fault, f"{fault.fault} is over")
            await kind.undo(self._system, fault)
        else:
            await self._system.recovered(fault.target)
        happened.ended = world.now
        await asyncio.sleep(AFTERMATH)
        self.active[kind.name] -= 1

    def _tell(self, fault: Fault, told: str) -> None:
        self._system.world.note("fault", told, process=fault.target or "deployment")
