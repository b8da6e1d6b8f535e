"""A deployment: its services, each on a host of its own, and who starts them again.

    start ──▶ up ──kill, crash──▶ down ──after a drawn time──▶ up      the supervisor (systemd, Kubernetes)
               └──drain, restart, roll, scale──▶ ended in good order   the operator

The supervisor and the operator are outside of the world's processes: no fault hits them.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import RyzansteinError
from shared.service.lifecycle import Service
from tests.simulation.core.processes import OUTSIDE, Host, Process
from tests.simulation.core.world import World
from tests.simulation.deployment import services, settings, versions
from tests.simulation.deployment.brokers import PORT
from tests.simulation.deployment.services import ROLES

# Seconds that a dead service is away, from and to: a supervisor's pause, or a pod on another node.
RESTART = (0.1, 10.0)
START_WITHIN = 120.0  # seconds in which a service starts while nothing is wrong
END_WITHIN = 120.0


class Member:
    """One place of a deployment: a service through all its lives."""

    def __init__(self, name: str, role: str, host: Host, given: Mapping[str, Any], version: str) -> None:
        self.name, self.role, self.host = name, role, host
        self.settings = dict(given)
        self.version = version
        self.process: Process | None = None  # None: it has never run
        self.service: Service | None = None  # of the last life; None before its settings are read
        self.lives = 0
        self.wanted = False  # whether the supervisor starts it again
        self.errors: list[BaseException] = []  # what lives have ended with
        self.changed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def state(self) -> str:
        return str(self.service.state) if self.running and self.service is not None else "down"

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    async def until(self, held: Callable[[], bool], seconds: float) -> None:
        """Raises `TimeoutError`."""
        try:
            async with asyncio.timeout(seconds):
                while not held():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{self.name} is {self.state} after {seconds:g} s; its lives ended with {self.errors}"
            ) from None


class Deployment:
    """Its methods are called outside of the world's processes."""

    def __init__(
        self, world: World, nats_url: str = f"nats://broker-1:{PORT}", slower: float = settings.SLOWER
    ) -> None:
        """`nats_url`: of the brokers that the services shall use; `slower`: how much rarer beats are than in
        production."""
        settings.apply_paces(slower)
        self._slower = slower
        services.install()
        self.world = world
        world.loop.world = world  # type: ignore[attr-defined]  # executors start processes in it
        self.nats_url = nats_url
        self.members: dict[str, Member] = {}
        self._draw = random.Random(f"{world.seed} deployment")
        self._restarts: dict[str, asyncio.TimerHandle] = {}

    # --- what there is -----------------------------------------------------------------------------

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    def gateways(self) -> list[Member]:
        return self.of("gateway")

    def add(
        self, role: str, name: str = "", *, host: str = "", version: str = versions.CURRENT_RELEASE, **changes: Any
    ) -> Member:
        """A place for a service, which is not started yet. `changes`: of its settings."""
        if role not in ROLES:
            raise ValueError(f"there is no service {role!r}; known are {', '.join(ROLES)}")
        name = name or self._free_name(role)
        if name in self.members:
            raise ValueError(f"there is a {name} already")
        member = Member(name, role, self.world.host(host or name), settings.of(role, self._slower, **changes), version)
        self.members[name] = member
        return member

    def _free_name(self, role: str) -> str:
        number = 1
        while f"{role}-{number}" in self.members:
            number += 1
        return f"{role}-{number}"

    # --- lives -------------------------------------------------------------------------------------

    async def start(self, *members: Member) -> None:
        """These, or all that do not run; returns once they are ready. Raises `TimeoutError`."""
        some = members or [member for member in self.members.values() if not member.running]
        for member in some:
            self.begin(member)
        await self.ready(*some)

    async def ready(self, *members: Member, within: float = START_WITHIN) -> None:
        """Returns once these, or all that are wanted, are. Raises `TimeoutError`."""
        for member in members or [member for member in self.members.values() if member.wanted]:
            await member.until(lambda member=member: member.ready, within)

    def begin(self, member: Member) -> None:
        """Starts it without waiting; nothing where it runs."""
        if (timer := self._restarts.pop(member.name, None)) is not None:
            timer.cancel()
        member.wanted = True
        if member.running:
            return
        if not member.host.powered:
            self._begin_later(member)
            return
        member.lives += 1
        process = self.world.start(member.name, member.host, lambda: self._life(member))
        process.on_end = lambda: self._ended(member, process)
        member.process = process

    async def _life(self, member: Member) -> None:
        """In the process: what `shared.service.lifecycle.main` does, less its signals."""
        process = member.process
        assert process is not None, "it is set before the loop goes on"
        versions.speak(process, member.version)
        role, code = ROLES[member.role], 1
        given = member.settings | {"nats_url": self.nats_url, "instance": member.name}
        try:
            service = member.service = role.make(role.settings(**given))
            service.on_state = lambda state: member.changed.set()
            await service.run()
            code = 0
        except RyzansteinError as error:
            member.errors.append(error)  # it has told its one sentence, and is started again
        except Exception as error:
            member.errors.append(error)
            told = {"message": f"{member.name} ended by a fault of its own", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)
        finally:
            asyncio.get_running_loop().call_soon(self.world.kill, process, code, context=OUTSIDE.context())

    def _ended(self, member: Member, process: Process) -> None:
        """However it came; the supervisor sees it."""
        versions.forget(process)
        if member.process is not process:
            return
        member.service = None
        member.changed.set()
        if member.wanted and member.name in self.members:
            self._begin_later(member)

    def _begin_later(self, member: Member) -> None:
        self._restarts[member.name] = self.world.loop.call_later(
            self._draw.uniform(*RESTART), self.begin, member, context=OUTSIDE.context()
        )

    def kill(self, member: Member) -> None:
        """SIGKILL; it is started again."""
        if member.process is not None:
            self.world.kill(member.process)

    # --- the operator --------------------------------------------------------------------------------

    async def drain(self, member: Member, *, within: float = END_WITHIN) -> None:
        """SIGTERM; returns when it has ended, and is not started again. Raises `TimeoutError`."""
        member.wanted = False
        if (timer := self._restarts.pop(member.name, None)) is not None:
            timer.cancel()
        self._terminate(member)
        try:
            await member.until(lambda: not member.running, within)
        except TimeoutError:
            self.kill(member)  # as Kubernetes does after its grace period
            raise

    def _terminate(self, member: Member) -> None:
        if member.running and member.service is not None:
            member.process.context().run(member.service.end)
        elif member.running:
            self.world.kill(member.process)

    async def restart(self, member: Member, *, version: str = "", **changes: Any) -> None:
        """In good order, perhaps as another version or with other settings; returns once it is ready."""
        try:
            await self.drain(member)
        finally:
            member.version = version or member.version
            member.settings |= changes
            self.begin(member)
        await self.ready(member)

    async def roll(self, *roles: str, version: str = "", **changes: Any) -> None:
        """A rolling restart of all services, or of those of some roles: one after the other."""
        for role in roles or [role for role in ROLES if role != "broker"]:
            for member in self.of(role):
                if member.wanted:
                    await self.restart(member, version=version, **changes)

    async def scale(self, role: str, count: int, **changes: Any) -> None:
        """The last ones leave in good order, or new ones come; returns once that is done."""
        there = [member for member in self.of(role) if member.wanted]
        for member in reversed(there[count:]):
            await self.drain(member)
            del self.members[member.name]
        new = [self.add(role, **changes) for _ in range(count - len(there))]
        if new:
            await self.start(*new)

    async def stop(self) -> None:
        """All, in good order: first those that take requests."""
        for role in reversed(ROLES):
            await asyncio.gather(*(self.drain(member) for member in self.of(role)))
