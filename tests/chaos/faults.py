"""Everything that is done to the house, each with how it is noticed, undone, and known to be over."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.chaos.cluster_fixture import House

HOLD = 4.0  # seconds that NATS stands still

SAY = 2.0  # seconds that a ring which wakes gets to say something
UNWATCHED = 1.0  # seconds without a health monitor
NATS, ALL_MONITORS = "nats", "all monitors"
SAID = {signal.SIGKILL: "kill -9", signal.SIGSTOP: "SIGSTOP"}


class Fault(Protocol):
    """One thing that goes wrong. Times are seconds of `time.monotonic`."""

    name: str
    target: str  # the instance that is hit, or `NATS`, or `ALL_MONITORS`
    may_refuse: bool  # whether new requests may be told to come again meanwhile

    async def inject(self, house: House) -> None: ...

    async def detected(self, house: House, at: float) -> float | None:
        """When the house noticed; None where nobody is to."""
        ...

    async def heal(self, house: House) -> None:
        """What an operator or supervisor would do."""
        ...

    async def recovered(self, house: House, at: float) -> float:
        """When everything was as before."""
        ...


def group_of(executor: str) -> str:
    return executor.replace("executor", "group")


async def _taken_over(house: House, moved: int) -> None:
    """Until more than `moved` streams have another ring, or nobody moves one."""
    with contextlib.suppress(AssertionError):
        await house.watch.until(lambda: len(house.watch.moved) > moved, SAY, "another ring takes over")


@dataclass
class _OfRing:
    """Faults of a ring that its supervisor sees: it is taken down and up without our help."""

    executor: str
    rank: int = 0
    may_refuse = False

    @property
    def target(self) -> str:
        return self.executor

    async def detected(self, house: House, at: float) -> float | None:
        return await house.watch.down(group_of(self.executor), at)

    async def heal(self, house: House) -> None:
        pass

    async def recovered(self, house: House, at: float) -> float:
        up = await house.watch.up(group_of(self.executor), at)
        await house.ready(self.executor)
        return up


@dataclass
class SignalRank(_OfRing):
    number: signal.Signals = signal.SIGKILL

    @property
    def name(self) -> str:
        return f"{SAID[self.number]} of rank {self.rank}"

    async def inject(self, house: House) -> None:
        os.kill(house.ranks(self.executor)[self.rank], self.number)


class KillRing(_OfRing):
    """The supervisor and every rank at the same moment."""

    name = "kill -9 of a whole ring"

    async def inject(self, house: House) -> None:
        for pid in (house.members[self.executor].pid, *house.ranks(self.executor)):
            os.kill(pid, signal.SIGKILL)

    async def heal(self, house: House) -> None:
        await house.members[self.executor].ended()
        await house.start(self.executor)


class StopRing(_OfRing):
    """The supervisor and every rank stand still; replaced meanwhile, they wake and go on talking."""

    name = "SIGSTOP of a whole ring, woken after others took over"
    _ranks: list[int] = []
    _moved = 0

    async def inject(self, house: House) -> None:
        self._ranks, self._moved = house.ranks(self.executor), len(house.watch.moved)
        for pid in (house.members[self.executor].pid, *self._ranks):
            os.kill(pid, signal.SIGSTOP)

    async def heal(self, house: House) -> None:
        """Once another ring has taken over; the ranks first, so that they talk before their supervisor
        wakes and ends them: it finds that they have not moved for long. (A ring without work says nothing.)"""
        await _taken_over(house, self._moved)
        watch, late = house.watch, house.watch.late
        for pid in self._ranks:
            os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(AssertionError):
            await watch.until(lambda: watch.late > late, SAY, "the ring talks")
        house.members[self.executor].signal(signal.SIGCONT)


class KillUnwatchedRank(_OfRing):
    """A rank dies while there is no health monitor; those that are started later must find it out."""

    target = ALL_MONITORS
    name = "kill -9 of a rank while no health monitor lives"

    async def inject(self, house: House) -> None:
        monitors = [name for name, member in house.members.items() if member.service == "health-monitor"]
        for name in monitors:
            house.members[name].signal(signal.SIGKILL)
            await house.members[name].ended()
        os.kill(house.ranks(self.executor)[self.rank], signal.SIGKILL)
        await asyncio.sleep(UNWATCHED)
        for name in monitors:
            await house.start(name)


@dataclass
class _OfService:
    instance: str
    may_refuse: bool = False

    @property
    def target(self) -> str:
        return self.instance

    @property
    def service(self) -> str:
        return self.instance.rpartition("-")[0].replace("-", " ")

    async def detected(self, house: House, at: float) -> float | None:
        return await house.watch.service(self.instance, "gone", at)

    async def recovered(self, house: House, at: float) -> float:
        await house.ready(self.instance)
        return await house.watch.service(self.instance, "ready", at)


class KillService(_OfService):
    @property
    def name(self) -> str:
        return f"kill -9 of a {self.service}"

    async def inject(self, house: House) -> None:
        house.members[self.instance].signal(signal.SIGKILL)
        await house.members[self.instance].ended()

    async def heal(self, house: House) -> None:
        await house.start(self.instance)


class StopService(_OfService):
    @property
    def name(self) -> str:
        return f"SIGSTOP of a {self.service}"

    async def inject(self, house: House) -> None:
        house.members[self.instance].signal(signal.SIGSTOP)

    async def heal(self, house: House) -> None:
        house.members[self.instance].signal(signal.SIGCONT)


class Partition(_OfService):
    """Packets between a service and NATS are lost, and nobody says goodbye."""

    @property
    def name(self) -> str:
        return f"partition of {'an' if self.service[0] in 'aeiou' else 'a'} {self.service}"

    async def inject(self, house: House) -> None:
        await house.members[self.instance].link.cut()

    async def heal(self, house: House) -> None:
        await house.members[self.instance].link.heal()


class PartitionExecutor(Partition):
    """Healed once another ring has taken over: what the ring has computed meanwhile comes after that, and too late."""

    _moved = 0

    async def inject(self, house: House) -> None:
        self._moved = len(house.watch.moved)
        await super().inject(house)

    async def heal(self, house: House) -> None:
        await _taken_over(house, self._moved)
        await super().heal(house)

    async def detected(self, house: House, at: float) -> float | None:
        return await house.watch.down(group_of(self.instance), at)

    async def recovered(self, house: House, at: float) -> float:
        return await house.watch.up(group_of(self.instance), at)


class KillNats:
    name = "kill -9 of NATS"
    target = NATS
    may_refuse = True

    async def inject(self, house: House) -> None:
        await house.broker.kill()

    async def detected(self, house: House, at: float) -> float | None:
        return await _poll(lambda: not house.bus.connected)

    async def heal(self, house: House) -> None:
        await house.broker.up()

    async def recovered(self, house: House, at: float) -> float:
        return await _poll(lambda: house.bus.connected)


class StopNats:
    """Shorter than the services' patience: nothing is to be noticed but the wait."""

    name = "SIGSTOP of NATS"
    target = NATS
    may_refuse = True

    async def inject(self, house: House) -> None:
        house.broker.signal(signal.SIGSTOP)

    async def detected(self, house: House, at: float) -> float | None:
        await asyncio.sleep(HOLD)
        return None

    async def heal(self, house: House) -> None:
        house.broker.signal(signal.SIGCONT)

    async def recovered(self, house: House, at: float) -> float:
        await house.bus.flush()
        return time.monotonic()


async def _poll(holds: Callable[[], bool], seconds: float = 30) -> float:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"it did not come true within {seconds:g} s"
        await asyncio.sleep(0.002)
    return time.monotonic()


def all_faults(number: int = 1) -> dict[str, Callable[[], Fault]]:
    """By a short name, which tests and schedules use; made anew for each use.

    `number`: of the instance that is hit, where that can be chosen.
    """
    executor = f"executor-{number}"
    return {
        "kill-rank-0": lambda: SignalRank(executor),
        "kill-rank-1": lambda: SignalRank(executor, 1),
        "stop-rank-0": lambda: SignalRank(executor, 0, signal.SIGSTOP),
        "stop-rank-1": lambda: SignalRank(executor, 1, signal.SIGSTOP),
        "kill-ring": lambda: KillRing(executor),
        "stop-ring": lambda: StopRing(executor),
        "kill-unwatched": lambda: KillUnwatchedRank(executor),
        "kill-gateway": lambda: KillService(f"gateway-{number}", may_refuse=True),  # one that starts says so
        "stop-gateway": lambda: StopService(f"gateway-{number}"),
        "kill-scheduler": lambda: KillService(f"scheduler-{number}"),
        "stop-scheduler": lambda: StopService(f"scheduler-{number}"),
        "kill-monitor": lambda: KillService(f"health-monitor-{number}"),
        "stop-monitor": lambda: StopService(f"health-monitor-{number}"),
        "kill-nats": KillNats,
        "stop-nats": StopNats,
        "cut-executor": lambda: PartitionExecutor("executor-0"),
        "cut-gateway": lambda: Partition("gateway-0", may_refuse=True),
        "cut-scheduler": lambda: Partition("scheduler-0"),
    }


CUTTABLE = ("executor-0", "gateway-0", "scheduler-0")  # what `all_faults` cuts off
