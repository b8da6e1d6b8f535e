"""The whole control plane: brokers, services, their operator, and clients with their promises."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.simulation.bugs.table import BUGS
from tests.simulation.clients.client import Plan
from tests.simulation.clients.crowd import Crowd
from tests.simulation.clients.registry import REGISTRY
from tests.simulation.clients.tenants import watch_poison
from tests.simulation.core.loop import Failure
from tests.simulation.core.processes import Process
from tests.simulation.core.world import World
from tests.simulation.deployment import logs
from tests.simulation.deployment.brokers import PORT
from tests.simulation.deployment.deployment import Deployment, Member
from tests.simulation.deployment.services import ROLES
from tests.simulation.deployment.settings import SLOWER
from tests.simulation.faults.injection import Happened
from tests.simulation.faults.kinds import kind_of
from tests.simulation.faults.schedule import ClientPlan, Schedule
from tests.simulation.promises import readings
from tests.simulation.promises.all import promises
from tests.simulation.promises.evidence import Evidence, Holdings, Reading, StoreLog
from tests.simulation.promises.evidence import Fault as HappenedFault
from tests.simulation.promises.promise import Watch
from tests.simulation.scenarios.scenario import Scenario
from tests.simulation.systems.keys import Keys
from tests.simulation.systems.observation import Records, watch_generations, watch_store
from tests.simulation.systems.operations import Operations
from tests.simulation.systems.outcome import Broken
from tests.simulation.systems.transitions import Transitions

# By role. A single broker that loses power keeps what it has acknowledged only where it syncs always.
DEFAULTS: dict[str, dict[str, Any]] = {"broker": {"sync_interval": 0.0}}
QUIET = 60.0  # virtual seconds after everything has ended, in which what was held must become free
SERVED_WITHIN = 300.0  # virtual seconds in which an undisturbed deployment serves its model
LOOK = 5.0  # virtual seconds between two looks at who has what
# Gateways that one line ends: more than it may, and few enough for a run in which nobody strikes it to end.
MOST_POISONED = 6
SECONDS = ("pause", "wait")  # of plans: what may have fractions


class ControlPlane:
    def __init__(self, world: World, scenario: Scenario, schedule: Schedule, transitions: Transitions) -> None:
        for bug in schedule.bugs:
            BUGS[bug].put_back()
        watch_generations(transitions)
        logs.configure()
        logs.to(self._logged)
        self.world, self._scenario = world, scenario
        names = scenario.instances()
        self.deployment = Deployment(
            world, ",".join(f"nats://{name}:{PORT}" for name in names.get("broker", ())), scenario.slower
        )
        for role in ROLES:
            for name in names.get(role, ()):
                given = scenario.settings.get(role, {}) | scenario.settings.get(name, {})
                self.deployment.add(role, name, **DEFAULTS.get(role, {}) | given)
        self.crowd = Crowd(schedule.seed, self._gateways, self._start_client)
        self._store, self._records = StoreLog(), Records(transitions)
        watch_store(self._stored)
        watch_poison(self._poisoned)
        self._watch = Watch(self.crowd.history, promises())
        self._keys = Keys(self.crowd, self.deployment, self._start_client)
        self._holdings, self._readings = Holdings(), list[Reading]()
        self._found: list[Broken] = []
        self._operations = Operations(
            world, self.deployment, self._keys, lambda told: self._found.append(Broken("operator", told))
        )

    @property
    def _patience(self) -> float:
        return self._scenario.slower / SLOWER

    @property
    def requests(self) -> int:
        return len(self.crowd.history.requests)

    def _gateways(self) -> Sequence[str]:
        """As a load balancer has them that asks each for its readiness now and then."""
        return [f"{member.host.name}:8000" for member in self.deployment.gateways() if member.wanted]

    def _start_client(self, name: str, main: object) -> Process:
        return self.world.start(name, self.world.host(name), main)  # type: ignore[arg-type]

    def _stored(self, subject: str, header: bytes, payload: bytes) -> None:
        self._store.wrote(self.world.now, subject, header, payload)
        self._records.stored(subject, payload)

    def _poisoned(self, batch: str) -> bool:
        lost = self.crowd.history.poisoned
        lost[batch] += 1
        return lost[batch] <= MOST_POISONED

    def _logged(self, process: str, level: str, event: str, fields: Mapping[str, object]) -> None:
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        self.world.note("log", f"{level} {event} {told}", process=process)
        if level in ("error", "critical") or event.endswith("unexpected_error"):
            self._found.append(Broken("no_error", f"{process} at {self.world.now:.3f} s: {event} {told}"))

    # --- as faults see it ------------------------------------------------------------------------------

    def instances(self) -> Mapping[str, Sequence[str]]:
        return self._scenario.instances()

    def process(self, name: str) -> Process | None:
        if name in self.deployment.members:
            process = self.deployment.members[name].process
        else:
            process = next((one for one in self.world.processes if one.name == name and one.alive), None)
        return process if process is not None and process.alive else None

    async def recovered(self, name: str) -> None:
        members = [self.deployment.members[name]] if name else list(self.deployment.members.values())
        for member in members:
            if member.wanted:
                await member.until(lambda member=member: member.ready, math.inf)

    async def operate(self, verb: str, target: str, parameters: Mapping[str, object]) -> None:
        await self._operations.operate(verb, target, parameters)

    # --- the run ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.deployment.start()
        await self._until_served()
        await self._keys.open(self._scenario.tenants)
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _until_served(self) -> None:
        """Until each gateway knows the model that clients ask, where there is one. Raises `TimeoutError`."""
        around, executors = self.crowd.surroundings("operator"), self.deployment.of("executor")
        async with asyncio.timeout(SERVED_WITHIN):
            if any(one.settings.get("takes_models") for one in executors):
                entry = {"source": "simulated/stub", "least": len(executors), "most": len(executors)}
                await around.insist("PUT", f"{REGISTRY}/{around.model}", entry)
            for _ in self.deployment.gateways() if executors else ():
                while around.model not in (await around.insist("GET", "/v1/models"))[0].body.decode():  # noqa: ASYNC110
                    await asyncio.sleep(0.5)

    async def serve(self, plans: Sequence[ClientPlan]) -> None:
        await asyncio.gather(*(self._serve(plan) for plan in plans))

    async def _serve(self, plan: ClientPlan) -> None:
        await asyncio.sleep(plan.at)
        spans = {name: _whole(name, span) for name, span in plan.parameters.items()}
        tenant, token = await self._keys.of(plan)
        made = Plan(requests=plan.requests, **spans)
        await self._keys.run(self.crowd.add(plan.client, made, name=plan.name, tenant=tenant, token=token))

    async def settle(self) -> None:
        await self.deployment.ready()
        audited = asyncio.Event()
        self._start_client("auditor", self.crowd.auditor(audited.set))
        await audited.wait()
        await asyncio.sleep(QUIET * self._patience)
        self._readings += self._read()
        self._looking.cancel()

    async def _look(self) -> None:
        """At who has what, of those that reach the broker."""
        while True:
            await asyncio.sleep(LOOK)
            reached = [one for one in self.deployment.members.values() if one.ready and not self._is_away(one)]
            self._holdings.look(self.world.now, readings.held((one.name, one.role, one.service) for one in reached))
            self._readings += [one for one in self._read_services() if one.always and one.count > one.most]

    def _is_away(self, member: Member) -> bool:
        process = member.process
        cut = any(self.world.network.is_cut(member.host.name, one.host.name) for one in self.deployment.of("broker"))
        return process is None or process.stopped or cut

    def _read(self) -> Iterator[Reading]:
        yield from self._read_services()
        yield from readings.of_groups(self._store)
        yield from readings.of_engines(self.world.processes)

    def _read_services(self) -> Iterator[Reading]:
        for member in self.deployment.members.values():
            if member.ready and member.role in readings.BY_ROLE:
                yield from readings.BY_ROLE[member.role](member.name, member.service)

    def broken(self, happened: Sequence[Happened], *, whole: bool) -> list[Broken]:
        faults = [
            HappenedFault(
                one.fault.fault,
                one.fault.target,
                one.begun,
                min(one.ended, self.world.now),
                kind_of(one.fault.fault).refuses,
            )
            for one in happened
        ]
        settings = {
            "model_lease": next((one.settings["model_lease"] for one in self.deployment.of("scheduler")), 0.0),
            "max_generations": self._scenario.settings.get("gateway", {}).get("max_generations", 0),
        }
        evidence = Evidence(
            self.crowd.history,
            self.world.now,
            faults,
            self._store,
            self._holdings,
            self._readings,
            whole,
            settings,
            self._patience,
        )
        return [*self._found, *self._watch.after(evidence), *map(_failed, self.world.failures)]


def _failed(failure: Failure) -> Broken:
    told = f"{failure.process} at {failure.at:.3f} s: {failure.message}: {failure.error!r}"
    return Broken("no_error", told, failure.process)


def _whole(name: str, span: tuple[float, float]) -> tuple[float, float]:
    """Only seconds have fractions."""
    return span if name in SECONDS else (int(span[0]), int(span[1]))
