"""One group that a host was told to load: what is done to it, until it is gone."""

import asyncio

import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.group import GroupSupervisor
from shared.errors import InternalError, InvalidRequest, RyzansteinError, Unavailable
from shared.messages import HostModel, HostReply, ModelSpec, UnloadModel

log = structlog.get_logger(__name__)


class HostLoad:
    def __init__(self, group: str, spec: ModelSpec, settings: ExecutorSettings) -> None:
        self.group = group
        self.spec = spec
        self.settings = settings
        self.supervisor: GroupSupervisor | None = None
        # Fetches its files; cancelled where they are not wanted any more.
        self.preparing: asyncio.Task[str] | None = None
        self.stage = ("", 0, 0)  # what is done to the files before they are loaded, bytes done, bytes in all
        self.memory = 0
        self.unload: UnloadModel | None = None  # how it was told to end
        self.remove = False  # whether its files go with it

    def cancel(self) -> None:
        """Its files are not fetched any more."""
        if self.preparing is not None:
            self.preparing.cancel()

    def report(self) -> HostModel | None:
        """None: its group tells."""
        if self.supervisor is None:
            _, done, total = self.stage
            return HostModel(self.spec.name, "downloading", done, total, memory=self.memory)
        if self.supervisor.ready.is_set():
            return None
        done, total = self.supervisor.loading
        return HostModel(self.spec.name, "loading", done, total, memory=self.memory)

    def reply(self, spec: ModelSpec) -> HostReply:
        """To whoever asks for the group again, to serve `spec`. Raises `InvalidRequest`, `Unavailable`."""
        if self.unload is not None:
            raise Unavailable(f"The group {self.group} is being unloaded; load it again when it is gone.")
        own = self.spec
        if (own.name, own.source, own.revision, own.settings) != (spec.name, spec.source, spec.revision, spec.settings):
            raise InvalidRequest(
                f"The group {self.group} serves the model {own.name} with other settings; unload it first."
            )
        return HostReply(ok=True, memory=self.memory)

    def unwanted(self) -> RyzansteinError:
        return Unavailable(f"The model {self.spec.name} is no longer wanted.")

    def fault(self, error: Exception) -> RyzansteinError:
        """What is told of an error that is a fault of the executor; logs where it was."""
        log.exception("model_load_fault", group=self.group, exc_info=error)
        return InternalError(
            f"The model {self.spec.name} could not be loaded by a fault of the executor ({type(error).__name__}); its "
            "log says where."
        )
