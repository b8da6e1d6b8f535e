"""The executor service: its groups, and where it is told to load and unload models.

It imports no torch and does no work per step. Where it is started with a model it is as good as that model's group: it
ends with it. Without one it starts empty, and waits to be told.
"""

import tempfile
from pathlib import Path
from typing import ClassVar

import msgspec
import structlog
from nats.aio.msg import Msg

from services.executor.core.settings import ExecutorSettings, check_engine
from services.executor.ipc.activity import ActivityPage
from services.executor.supervisor.group import GroupSupervisor
from services.executor.supervisor.host.jobs import HostJobKind
from services.executor.supervisor.host.model_host import ModelHost
from services.executor.supervisor.metrics import MergedCollector, vllm_aliases
from services.executor.supervisor.multinode.head import HeadNode
from services.executor.supervisor.ranks.rank_process import ForkClient, LocalRank, StartRank, fork_client
from services.executor.supervisor.trainings.host_trainings import TRAININGS
from shared.config import with_sections
from shared.errors import ConfigurationError, InvalidRequest
from shared.messages import GroupBeat, HostBeat, HostCommand, HostReply, ServiceName
from shared.nats import subjects
from shared.nats.bus import encode
from shared.service.endpoints import Health
from shared.service.lifecycle import Service
from shared.service.logs import LevelChange
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)

MOST_COMMANDS = 64  # that are being answered at a time; the others are refused

_commands: msgspec.msgpack.Decoder[HostCommand] = msgspec.msgpack.Decoder(HostCommand)


class ExecutorService(Service):
    name: ClassVar[ServiceName] = "executor"
    # Kinds of jobs that run beside models; taking a line out takes the feature out.
    job_kinds: tuple[HostJobKind, ...] = (TRAININGS,)

    @classmethod
    def settings_type(cls) -> type[ExecutorSettings]:
        """An executor's settings, and those of its kinds of jobs."""
        return with_sections(ExecutorSettings, [kind.settings for kind in cls.job_kinds])

    def __init__(self, settings: ExecutorSettings, *, start_rank: StartRank = LocalRank.start) -> None:
        """`start_rank`: its processes."""
        super().__init__(settings)
        self.start_rank = start_rank
        check_engine(settings)
        if not settings.model and not settings.is_host and settings.engine != "stub":
            raise ConfigurationError(
                "No model is named; give --model or set RYZANSTEIN_MODEL to a directory, a GGUF file "
                "or a hub name, or have the executor load what it is told to with --takes-models."
            )
        self.forks: ForkClient = fork_client(settings)
        # From `run` on, where there may be jobs that pause for requests.
        self.activity: ActivityPage | None = None
        self._nodes = HeadNode(settings) if settings.nnodes > 1 else None
        self._host = ModelHost(settings, self, self.job_kinds)
        self._own: GroupSupervisor | None = None
        if settings.model or not settings.is_host or (settings.engine == "stub" and settings.served_model_name):
            name = settings.group or self.instance
            self._own = GroupSupervisor(settings, name, self, self._nodes)
            self._host.own(self._own)
        self._answers = TaskSet(failed="host_command_failed")
        groups = self._host.groups
        of_groups = MergedCollector(lambda: [one for group in groups.values() for one in group.collectors])
        for collector in (of_groups, self._host.metrics, *(jobs.metrics for jobs in self._host.jobs)):
            self.registry.register(collector)
        if settings.metrics_aliases:
            self.registry.register(vllm_aliases(of_groups))

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ranks' imports take longer than anything else at a start: they begin first."""
        self.forks.start()
        try:
            with tempfile.TemporaryDirectory(prefix="ryzanstein-host-") as directory:
                if any(jobs.preemptible for jobs in self._host.jobs):
                    self.activity = ActivityPage(Path(directory) / "activity", self._on_request)
                await super().run()
        finally:
            self.forks.close()

    async def start(self) -> None:
        if self._nodes is not None:
            await self._nodes.start()
        if self._own is not None:
            self.spawn(self._live(self._own), "group")
        subject = subjects.host_control(self.instance)
        await self.bus.client.subscribe(subject, cb=self._on_command)
        await self._host.start()

    async def _live(self, group: GroupSupervisor) -> None:
        """The life of the group that the executor was started with, which ends the executor, unless it was unloaded."""
        error = await group.run()
        if self._host.outlives(group):
            self._own = None
        elif error is not None:
            self.fail(error)
        else:
            self.end()

    async def stop(self) -> None:
        """Drains every group: what runs may finish; what does not is continued by another ring."""
        await self._answers.cancel()
        await self._host.stop()
        if self._nodes is not None:
            await self._nodes.stop()

    def _on_request(self) -> None:
        for jobs in self._host.jobs:
            jobs.on_request()

    # --- commands --------------------------------------------------------------------------------

    async def _on_command(self, message: Msg) -> None:
        """Each is answered beside the others: some take as long as a subprocess does."""
        if len(self._answers) >= MOST_COMMANDS:
            log.warning("host_command_refused", reason=f"{MOST_COMMANDS} are being answered")
            return
        self._answers.spawn(self._answer(message))

    async def _answer(self, message: Msg) -> None:
        try:
            command = _commands.decode(message.data)
        except msgspec.DecodeError as error:
            log.warning("undecodable_message", subject=message.subject, error=str(error))
            text = f"The executor {self.instance} does not understand the command ({error}); is it of another version?"
            reply = HostReply(ok=False, code=InvalidRequest.code, error=text)
        else:
            reply = await self._host.on_command(command)
        if message.reply:
            await self.bus.client.publish(message.reply, encode(reply))

    # --- what is told ----------------------------------------------------------------------------

    def group_beats(self) -> list[GroupBeat]:
        return self._host.group_beats()

    def host_beat(self) -> HostBeat:
        return self._host.beat()

    def log_fields(self) -> dict[str, object]:
        return {"group": self._own.group} if self._own is not None and len(self._host.groups) == 1 else {}

    def on_log_level(self, change: LevelChange) -> None:
        self._host.set_log_level(change)

    def health(self) -> Health:
        base = super().health()
        if base.ready and self._own is not None and (reason := self._own.why_not_ready()):
            return Health(self.name, self.instance, self.state, ready=False, reason=reason)
        return base
