"""What an operator does, what befalls rings and the broker's store: the verbs of faults, on a deployment.

rank_crash, rank_fault, rank_hang, trainer_crash      children of an executor
engine_crash, engine_fault, engine_hang, engine_stall engines that schedule for themselves
store_full, stream_full, lost_acks, slow_consumer     a broker
drain, rolling_restart, upgrade                       services, one operation at a time
new_key, lower_limits                                 keys, while their clients ask
flood, poison_line, full_quotas                       tenants that make trouble for others
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.simulation.broker.jetstream import JetStream
from tests.simulation.clients.client import Plan
from tests.simulation.core.processes import Process
from tests.simulation.core.world import World
from tests.simulation.deployment import versions
from tests.simulation.deployment.brokers import disk_of
from tests.simulation.deployment.deployment import Deployment
from tests.simulation.systems.keys import Keys

FLOODING_TOKENS = (60, 120)  # of each answer of a flood
ENGINE = "rank/engine"
STALLED = 300.0  # seconds that a turn of an engine waits at most, which is not stopped and yet computes nothing
Parameters = Mapping[str, Any]
Wrong = Callable[[str], None]  # is told, in a sentence, of an operation that did not come to its end
# What befalls children of an executor: which of them, and what is done to each.
CHILDREN: dict[str, tuple[str, Callable[[World, Process], None]]] = {
    "rank_crash": ("rank", World.kill),
    "rank_fault": ("rank", lambda world, rank: world.kill(rank, -signal.SIGSEGV)),
    "rank_hang": ("rank", World.pause),
    "end_rank_hang": ("rank", World.resume),
    "trainer_crash": ("trainer", World.kill),
    "engine_crash": (ENGINE, World.kill),
    "engine_fault": (ENGINE, lambda world, engine: world.kill(engine, -signal.SIGSEGV)),
    "engine_hang": (ENGINE, World.pause),
    "end_engine_hang": (ENGINE, World.resume),
    "engine_stall": (ENGINE, lambda world, engine: world.starve(engine, STALLED)),
    "end_engine_stall": (ENGINE, lambda world, engine: world.starve(engine, 0.0)),
}


class Operations:
    """Outside of all processes, as the deployment's operator is."""

    def __init__(self, world: World, deployment: Deployment, keys: Keys, wrong: Wrong) -> None:
        self._world, self._deployment, self._keys, self._wrong = world, deployment, keys, wrong
        self._one_at_a_time = asyncio.Lock()

    async def operate(self, verb: str, target: str, parameters: Parameters) -> None:
        """`verb`: as `kinds.py` has it, or `end_` and that. Raises `NotImplementedError` where there is none."""
        if verb in CHILDREN:
            kind, befall = CHILDREN[verb]
            for child in self._children(target, kind):
                befall(self._world, child)
            return
        act = getattr(self, f"_{verb}", None)
        if act is None:
            raise NotImplementedError(f"The deployment knows no {verb}.")
        await act(target, parameters)

    def _children(self, target: str, kind: str) -> list[Process]:
        return [one for one in self._world.processes if one.alive and one.name == f"{target}/{kind}"]

    # --- a broker ------------------------------------------------------------------------------------

    async def _store_full(self, target: str, _: Parameters) -> None:
        disk_of(self._deployment.members[target].host).full = True

    async def _end_store_full(self, target: str, _: Parameters) -> None:
        """There is room again, and somebody starts it again: it takes nothing else."""
        broker = self._deployment.members[target]
        disk_of(broker.host).full = False
        self._deployment.kill(broker)

    async def _stream_full(self, target: str, parameters: Parameters) -> None:
        """One of those that refuse what is beyond their quota; others drop their oldest, as every day."""
        for jetstream in self._jetstream(target):
            names = sorted(name for name, one in jetstream.streams.items() if one.config.discard == "new")
            if names:
                number = int(float(parameters.get("number", 0.0)) * len(names))
                jetstream.full = names[min(number, len(names) - 1)]

    async def _end_stream_full(self, target: str, _: Parameters) -> None:
        for jetstream in self._jetstream(target):
            jetstream.full = ""

    async def _lost_acks(self, target: str, parameters: Parameters) -> None:
        for jetstream in self._jetstream(target):
            jetstream.lost_acks = float(parameters.get("share", 0.5))

    async def _end_lost_acks(self, target: str, _: Parameters) -> None:
        for jetstream in self._jetstream(target):
            jetstream.lost_acks = 0.0

    def _jetstream(self, target: str) -> list[JetStream]:
        """Of a broker's life that is now, if it has one; what is set in it ends with it."""
        broker: Any = self._deployment.members[target].service
        if broker is None or broker.server is None or broker.server.jetstream is None:
            return []
        jetstream = broker.server.jetstream
        return [getattr(jetstream, "local", jetstream)]

    async def _slow_consumer(self, target: str, _: Parameters) -> None:
        for broker in self._deployment.of("broker"):
            for end in self._world.network.connections(target, broker.name)[:1]:
                self._world.network.break_connection(end)

    # --- services --------------------------------------------------------------------------------------

    async def _drain(self, target: str, _: Parameters) -> None:
        work = self._deployment.restart(self._deployment.members[target])
        await self._in_order(work, f"{target} was to drain")

    async def _rolling_restart(self, target: str, _: Parameters) -> None:
        await self._in_order(self._deployment.roll(), "A rolling restart was under way")

    async def _upgrade(self, target: str, _: Parameters) -> None:
        """All to the other of two versions."""
        some = next(iter(self._deployment.members.values()))
        previous = some.version == versions.PREVIOUS_RELEASE
        version = versions.CURRENT_RELEASE if previous else versions.PREVIOUS_RELEASE
        await self._in_order(self._deployment.roll(version=version), f"An upgrade to {version} was under way")

    async def _in_order(self, work: Awaitable[None], what: str) -> None:
        """One operator does one thing at a time."""
        try:
            async with self._one_at_a_time:
                await work
        except TimeoutError as error:
            self._wrong(f"{what} at {self._world.now:.3f} s: {error}.")

    # --- keys ------------------------------------------------------------------------------------------

    async def _new_key(self, target: str, parameters: Parameters) -> None:
        await self._keys.replace(float(parameters.get("tenant", 0.0)))

    async def _lower_limits(self, target: str, parameters: Parameters) -> None:
        requests, concurrent = int(parameters.get("requests", 10)), int(parameters.get("concurrent", 1))
        await self._keys.limit(float(parameters.get("tenant", 0.0)), requests, concurrent)

    async def _end_lower_limits(self, target: str, parameters: Parameters) -> None:
        await self._keys.limit(float(parameters.get("tenant", 0.0)), 0, 0)

    # --- tenants ---------------------------------------------------------------------------------------

    async def _flood(self, target: str, parameters: Parameters) -> None:
        count = int(parameters.get("requests", 60))
        await self._trouble("flooding", parameters, (count, count), tokens=FLOODING_TOKENS)

    async def _poison_line(self, target: str, parameters: Parameters) -> None:
        count = int(parameters.get("lines", 8))
        await self._trouble("poison", parameters, (count, count))

    async def _full_quotas(self, target: str, parameters: Parameters) -> None:
        """Nothing where the scenario has no quotas that could be filled within it."""
        given = self._deployment.gateways()[0].settings
        if "tenant_files" in given and "tenant_training_jobs" in given:
            await self._trouble("filling", parameters, (given["tenant_files"], given["tenant_training_jobs"]))

    async def _trouble(
        self, kind: str, parameters: Parameters, size: tuple[int, int], tokens: tuple[int, int] = Plan().tokens
    ) -> None:
        plan = Plan(requests=1, pause=(0.0, 0.0), size=size, tokens=tokens)
        await self._keys.trouble(kind, float(parameters.get("tenant", 0.0)), plan)
