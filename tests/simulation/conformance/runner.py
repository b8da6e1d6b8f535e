"""Runs scripts against a server, and compares what came of them on two."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.js.errors import NotFoundError

from shared.errors import RyzansteinError
from shared.nats.bus import Bus
from shared.nats.objects import MissingObject
from tests.simulation.conformance import outcomes
from tests.simulation.conformance.buckets import Buckets
from tests.simulation.conformance.operations import Script, Step
from tests.simulation.conformance.plain import PATIENCE, Plain
from tests.simulation.conformance.servers import Server
from tests.simulation.conformance.services import Services

# Of a script that differs: a machine that stood still misses times, and what differs once only is not the model's.
TRIES = 3
# What an operation may raise: its outcome too. Anything else is a fault of the script.
EXPECTED = (nats.errors.Error, RyzansteinError, MissingObject, TimeoutError, ConnectionError, ValueError)


class Connected:
    """A connection and all that can be done over it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.plain, self.buckets, self.services = Plain(bus), Buckets(bus), Services(bus)

    def operation(self, name: str) -> Callable[..., Awaitable[Any]] | None:
        for level in (self.plain, self.buckets, self.services):
            if (found := getattr(level, name, None)) is not None:
                return found  # type: ignore[no-any-return]
        return None

    async def back(self, before: int) -> None:
        """Once the connection that was lost stands again."""
        async with asyncio.timeout(PATIENCE):
            while self.bus.reconnects <= before or not self.bus.connected:  # noqa: ASYNC110  # nats-py has no event
                await asyncio.sleep(0.02)
        await self.bus.flush()


class Run:
    """Of one script against one server."""

    def __init__(self, server: Server, *, users: bool = False) -> None:
        self._server = server
        self._users = users
        self._connected: dict[str, Connected] = {}

    async def script(self, script: Script) -> list[Any]:
        """The outcome of each step."""
        try:
            return [await self._outcome(step) for step in script.steps]
        finally:
            await self._clear()

    async def _outcome(self, step: Step) -> Any:
        try:
            result = await self._done(step)
        except EXPECTED as error:
            result = outcomes.of_error(error)
        return result

    async def _done(self, step: Step) -> Any:
        own = getattr(self, f"do_{step.name}", None)
        if own is not None:
            return await own(step.by, **step.args)
        operation = (await self._connection(step.by)).operation(step.name)
        if operation is None:
            raise LookupError(f"There is no operation {step.name}; see tests/simulation/conformance.")
        return await operation(**step.args)

    async def _connection(self, name: str) -> Connected:
        if name not in self._connected:
            settings = self._server.settings(name if self._users else "")
            self._connected[name] = Connected(await Bus.connect(settings, name))
        return self._connected[name]

    # --- operations on the server and on connections -------------------------------------------------

    async def do_restart(self, by: str, kill: bool = False) -> None:
        """The server; returns once everybody is connected again."""
        before = {name: one.bus.reconnects for name, one in self._connected.items()}
        await self._server.restart(kill=kill)
        for name, one in self._connected.items():
            await one.back(before[name])

    async def do_lose(self, by: str) -> None:
        """The connection `by` is reset; returns once it stands again."""
        one = await self._connection(by)
        before = one.bus.reconnects
        one.bus.client._transport._io_writer.transport.abort()
        await one.back(before)

    async def do_close(self, by: str) -> None:
        await self._connected.pop(by).bus.close()

    async def do_pause(self, by: str, seconds: float) -> None:
        """Where something is to happen by itself meanwhile, with plenty of time."""
        await asyncio.sleep(seconds)

    async def do_connect_as(self, by: str, user: str, password: str) -> None:
        known = self._server.settings(by if self._users else "")
        bus = await Bus.connect(
            known.model_copy(update={"nats_user": user, "nats_password": type(known.nats_password)(password)}), by
        )
        await bus.close()

    async def _clear(self) -> None:
        """The server has no streams for the next script."""
        for one in self._connected.values():
            await one.services.close_watches()
        connected, self._connected = self._connected, {}
        for one in connected.values():
            await one.bus.close()
        if self._users:
            return  # none of whom may delete streams: the server is of this script alone
        cleaner = await Bus.connect(self._server.settings(), "cleaner")
        try:
            await _delete_streams(cleaner)
        finally:
            await cleaner.close()


async def _delete_streams(bus: Bus) -> None:
    manager = bus.jetstream()
    for info in await manager.streams_info():
        with contextlib.suppress(NotFoundError):
            await manager.delete_stream(info.config.name or "")


@dataclass(frozen=True)
class Difference:
    script: Script
    place: int  # of the step
    real: Any
    model: Any

    def __str__(self) -> str:
        lines = [f"{self.script.name} (needed by {self.script.needed_by}):"]
        lines += [f"    {step}" for step in self.script.steps[: self.place]]
        lines += [f"--> {self.script.steps[self.place]}"]
        lines += [f"    nats-server: {self.real}", f"    the other:   {self.model}"]
        return "\n".join(lines)


async def compare(script: Script, real: Server, model: Server) -> Difference | None:
    """The first difference, where there is one each time; None: both do the same."""
    found: Difference | None = None
    for _ in range(TRIES):
        found = await _compare(script, real, model)
        if found is None:
            break
    return found


async def _compare(script: Script, real: Server, model: Server) -> Difference | None:
    first = await Run(real, users=script.users).script(script)
    second = await Run(model, users=script.users).script(script)
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other:
            return Difference(script, place, one, other)
    return None


def operations() -> set[str]:
    """The names of all."""
    found = {name.removeprefix("do_") for name in vars(Run) if name.startswith("do_")}
    for level in (Plain, Buckets, Services):
        found |= {
            name for name, member in vars(level).items() if inspect.iscoroutinefunction(member) and name[0] != "_"
        }
    return found
