"""The services as they are in a simulation: the product's own classes, with a listener that needs no socket.

Nothing else of them is replaced. What differs from production besides stands in `settings`.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.service import ExecutorService
from services.executor.supervisor.trainings.host_trainings import TRAININGS
from services.gateway.service import GatewayService
from services.health_monitor.service import HealthMonitorService, HealthMonitorSettings
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.service import lifecycle
from tests.simulation.core.asgi import AsgiServer
from tests.simulation.core.processes import CURRENT
from tests.simulation.core.world import World
from tests.simulation.deployment.brokers import Broker, BrokerSettings
from tests.simulation.deployment.children import Family
from tests.simulation.deployment.ranks import Ranks, directory_of, stand_in
from tests.simulation.deployment.trainers import Trainers


def install() -> None:
    """In a process that does nothing but simulate. Idempotent."""
    lifecycle.pid_namespace = lambda: CURRENT.get().host.name  # not this machine's: a seed is one run on all of them


class Told:
    """A class of services of which somebody outside hears when their state changes."""

    on_state: Callable[[str], None] | None = None

    @property
    def state(self) -> Any:
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        if self.on_state is not None:
            self.on_state(state)

    def make_server(self) -> Any:
        return AsgiServer(self.make_app(), CURRENT.get().host.name, self.listen_port())


class Gateway(Told, GatewayService): ...


class Scheduler(Told, SchedulerService): ...


class HealthMonitor(Told, HealthMonitorService): ...


class Executor(Told, ExecutorService):
    """Its ranks and trainers are processes of the world."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._world: World = asyncio.get_running_loop().world  # type: ignore[attr-defined]  # a deployment sets it
        stand_in()
        files = directory_of(self._world, CURRENT.get().host)
        settings = settings.model_copy(update={"model_cache": files})
        self.job_kinds = (TRAININGS._replace(make=partial(TRAININGS.make, start_trainer=self._start_trainer)),)
        super().__init__(settings, start_rank=self._start_rank)

    async def run(self) -> None:
        family = Family(self._world)
        self._ranks, self._trainers = Ranks(family), Trainers(family)
        await super().run()

    async def _start_rank(self, *given: Any) -> Any:
        return await self._ranks.start(*given)

    async def _start_trainer(self, *given: Any) -> Any:
        return await self._trainers.start(*given)


class Role(NamedTuple):
    """A kind of service."""

    settings: type[Any]
    make: Callable[[Any], Any]  # from its settings, in its process


# In the order in which they are started. Who has another kind of service adds it.
ROLES: dict[str, Role] = {
    "broker": Role(BrokerSettings, Broker),
    "health-monitor": Role(HealthMonitorSettings, HealthMonitor),
    "scheduler": Role(SchedulerSettings, Scheduler),
    "executor": Role(ExecutorService.settings_type(), Executor),
    "gateway": Role(GatewayService.settings_type(), Gateway),
}
