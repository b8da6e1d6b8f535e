"""Jobs that run on hosts beside models: what a kind of them gets from the executor, and what it is there. The kinds are
`ExecutorService.job_kinds`; without its line in that list an executor takes none of a kind."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from prometheus_client.registry import Collector

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.host.memory import HostMemory
from services.executor.supervisor.ring import GroupHost
from shared.config import CommonSettings
from shared.messages import HostCommand, HostReply, ModelSpec


class HostModels(Protocol):
    """What jobs need of the host's models."""

    def settings_of(self, spec: ModelSpec) -> ExecutorSettings:
        """Of a group that serves it. Raises `RyzansteinError`."""
        ...

    async def prepare_base(self, settings: ExecutorSettings) -> str:
        """Has its files made ready; returns what names it from then on. Raises `RyzansteinError`."""
        ...

    def serves(self, model: str) -> bool:
        """Whether one of its groups has it in memory."""
        ...

    def gpu_variables(self, devices: Iterable[int]) -> dict[str, str]:
        """Of the environment of a process that is to see these GPUs alone."""
        ...


class HostJobRunner(Protocol):
    """All jobs of one kind on a host."""

    @property
    def metrics(self) -> Collector: ...

    # Whether its jobs pause while somebody waits for an answer, and `on_request` must be called then.
    preemptible: bool

    def beat(self) -> dict[str, Any]:
        """Its fields of `HostBeat`."""
        ...

    def on_request(self) -> None:
        """A leader says that somebody waits for an answer."""
        ...

    async def on_command(self, command: HostCommand) -> HostReply | None:
        """None: it is not this kind's. Raises `RyzansteinError`."""
        ...

    async def evict(self, keys: Iterable[str]) -> None:
        """Ends those of its jobs that `HostMemory` knows by these keys; returns when they are gone."""
        ...

    async def stop(self) -> None:
        """Gives all its jobs back."""
        ...


class HostJobKind(NamedTuple):
    make: Callable[[ExecutorSettings, GroupHost, HostMemory, HostModels], HostJobRunner]
    # Its section of the executor's settings: `make` takes it out of those (`section_of`).
    settings: type[CommonSettings]
