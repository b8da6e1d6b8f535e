"""The services as they are in a simulation: the product's own classes, with a listener that needs no socket.

Nothing else of them is replaced. What differs from production besides stands in `settings`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from services.gateway.core.settings import GatewaySettings
from services.gateway.service import GatewayService
from services.health_monitor.service import HealthMonitorService, HealthMonitorSettings
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.config import CommonSettings
from shared.service.lifecycle import Service
from tests.simulation.core.asgi import AsgiServer
from tests.simulation.core.processes import CURRENT


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


class Role(NamedTuple):
    """A kind of service."""

    settings: type[CommonSettings]
    make: Callable[[Any], Service]
    """From its settings, in its process."""


ROLES: dict[str, Role] = {
    "health-monitor": Role(HealthMonitorSettings, HealthMonitor),
    "scheduler": Role(SchedulerSettings, Scheduler),
    "gateway": Role(GatewaySettings, Gateway),
}
"""In the order in which they are started. Who has another kind of service adds it."""
