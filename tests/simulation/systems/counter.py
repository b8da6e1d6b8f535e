"""A toy: a server that adds, and clients that try again until it has answered. It shows how the search works.

What was added must be what clients were told, whatever dies: the server keeps the ids of what it has carried out on the
disk of its host. The bug `counter_forgets_ids` leaves that out: a client whose answer was lost is counted twice.
"""

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence

from tests.simulation.core.processes import Process
from tests.simulation.core.world import World
from tests.simulation.faults.injection import Happened
from tests.simulation.faults.schedule import ClientPlan, Schedule
from tests.simulation.scenarios.scenario import Scenario
from tests.simulation.systems.outcome import Broken
from tests.simulation.systems.transitions import Transitions

PORT = 4222
RESTART_AFTER = 0.5


class _Lines(asyncio.Protocol):
    """Calls `heard` with each line."""

    def __init__(self, heard: "asyncio.Queue[str] | None" = None, server: "Counter | None" = None) -> None:
        self._heard, self._server, self._rest = heard, server, b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._server is not None and self.transport is not None:
                self.transport.write(self._server.add(line.decode()).encode() + b"\n")
            elif self._heard is not None:
                self._heard.put_nowait(line.decode())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._heard is not None:
            self._heard.put_nowait("")


class Counter:
    def __init__(self, world: World, scenario: Scenario, schedule: Schedule, transitions: Transitions) -> None:
        self.world, self._scenario, self._schedule = world, scenario, schedule
        self._transitions = transitions
        self._server: Process | None = None
        self._clients: dict[str, Process] = {}
        self._done: list[str] = []  # on the disk of the server's host
        self._acknowledged: set[str] = set()
        self._forgets = "counter_forgets_ids" in schedule.bugs
        self.requests = 0

    def instances(self) -> Mapping[str, Sequence[str]]:
        return self._scenario.instances()

    def process(self, name: str) -> Process | None:
        if name == "broker-1":
            return self._server if self._server is not None and self._server.alive else None
        return self._clients.get(name)

    async def recovered(self, name: str) -> None:
        await asyncio.sleep(RESTART_AFTER)

    async def operate(self, verb: str, target: str, parameters: Mapping[str, object]) -> None:
        raise NotImplementedError(f"The counter knows no {verb}.")

    # --- the server ----------------------------------------------------------------------------------

    def add(self, request: str) -> str:
        if self._forgets or request not in self._done:
            self._done.append(request)
            self._transitions.moved("request", request, "queued")
        return request

    async def _serve(self) -> None:
        await asyncio.get_running_loop().create_server(lambda: _Lines(server=self), "broker-1", PORT)
        await asyncio.Event().wait()

    async def _supervise(self) -> None:
        while True:
            host = self.world.host("broker-1")
            if host.powered and (self._server is None or not self._server.alive):
                self._server = self.world.start("broker-1", host, self._serve)
            await asyncio.sleep(RESTART_AFTER)

    # --- its clients -----------------------------------------------------------------------------------

    async def _client(self, plan: ClientPlan, over: "asyncio.Future[None]") -> None:
        chance = random.Random(plan.seed)
        for number in range(plan.requests):
            await asyncio.sleep(chance.uniform(0, 0.5))
            await self._ask(f"{plan.name}/{number}")
        over.set_result(None)

    async def _ask(self, request: str) -> None:
        self._transitions.moved("request", request, "received")
        self.requests += 1
        for attempt in itertools.count():
            heard: asyncio.Queue[str] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            try:
                transport, _ = await loop.create_connection(lambda q=heard: _Lines(q), "broker-1", PORT)
                transport.write(request.encode() + b"\n")
                async with asyncio.timeout(2.0):
                    answer = await heard.get()
            except (OSError, TimeoutError):
                answer = ""
            if answer == request:
                transport.close()
                break
            await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
        self._acknowledged.add(request)
        self._transitions.moved("request", request, "finished")

    # --- the run -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())
        await asyncio.sleep(0.01)

    async def serve(self, plans: Sequence[ClientPlan]) -> None:
        async def one(plan: ClientPlan) -> None:
            await asyncio.sleep(plan.at)
            over = asyncio.get_running_loop().create_future()
            self._clients[plan.name] = self.world.start(
                plan.name, self.world.host(plan.name), lambda: self._client(plan, over)
            )
            await over

        await asyncio.gather(*(one(plan) for plan in plans))

    async def settle(self) -> None:
        self._supervisor.cancel()

    def broken(self, happened: Sequence[Happened], *, whole: bool) -> list[Broken]:
        return [
            Broken("exactly_once", f"{request} was added {self._done.count(request)} times.", request)
            for request in sorted(self._acknowledged)
            if self._done.count(request) != 1
        ]
