"""All fine-tuning jobs of a host: begun and ended as it is told, within its places and its memory.

StartTraining ──▶ record read: mine? ──▶ memory promised ──▶ Training      told by heartbeats
StopTraining ───▶ record read: still mine?
a model is loaded, and needs the memory ──▶ state written ──▶ job given back
"""

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Any

import structlog
from pydantic import Field

from services.executor.core.settings import ExecutorSettings, served_name
from services.executor.supervisor.host.jobs import HostJobKind, HostModels
from services.executor.supervisor.host.memory import GPU_OVERHEAD, HostMemory
from services.executor.supervisor.host.model_files import StoredModel, read_config
from services.executor.supervisor.ring import GroupHost
from services.executor.supervisor.trainings.job_changes import MAX_REASON
from services.executor.supervisor.trainings.job_record import LocalJobRecord, NotMine
from services.executor.supervisor.trainings.memory import PROCESS, training_bytes
from services.executor.supervisor.trainings.metrics import TrainingCounts
from services.executor.supervisor.trainings.suspension import Suspension
from services.executor.supervisor.trainings.trainer_process import StartTrainer, TrainerProcess
from services.executor.supervisor.trainings.training import Halt, ReadyBase, Training
from shared.config import CommonSettings, section_of
from shared.errors import (
    BrokerUnavailable,
    InvalidRequest,
    ModelDoesNotFit,
    ModelNotStored,
    RyzansteinError,
    Unavailable,
)
from shared.messages import HostCommand, HostReply, HostTraining, ModelSpec
from shared.messages.registry import StartTraining, StopTraining
from shared.messages.training import TrainingJob
from shared.model_store.locks import ModelInUse, hold_model
from shared.nats.bus import Bus
from shared.nats.tenants import tenant_key
from shared.nats.training import training_jobs
from shared.tasks import TaskSet

MAKE_WAY_WITHIN = 10.0  # seconds that trainers have to write their states when a model needs their memory
LEAVE_WITHIN = 10.0  # the same when the executor ends
SETTLE_WITHIN = 5.0  # seconds beyond that in which a job is given back
RETRY_AFTER = 10.0  # seconds before a job that has made way is given to a host again
STUB_BYTES = 1 << 20  # memory of a trainer that computes nothing

log = structlog.get_logger(__name__)


class TrainingSettings(CommonSettings):
    """The section of a host's settings that comes with fine-tuning jobs."""

    trains: int = Field(default=1, ge=0, le=16)
    """Fine-tuning jobs that the executor trains at a time, in the time that interactive requests leave; 0: none. One
    that is a host of several (`nnodes`) trains none."""
    training_state_interval: float = Field(default=60.0, ge=0)
    """Seconds of training that a fine-tuning job loses at most when its executor dies: between two states that its
    trainer writes, unless one takes so long that they would cost more than 2%. 0: a state after every step."""


class HostTrainings:
    def __init__(
        self,
        settings: ExecutorSettings,
        service: GroupHost,
        memory: HostMemory,
        models: HostModels,
        start_trainer: StartTrainer = TrainerProcess.start,
    ) -> None:
        self._settings = settings
        self.start_trainer = start_trainer
        self._service, self.instance = service, service.instance
        self._memory = memory
        self._models = models
        section = section_of(settings, TrainingSettings)
        self.preemptible = section.trains > 0
        self.state_interval = section.training_state_interval
        self._places = section.trains if settings.nnodes == 1 else 0
        self._trainings: dict[str, Training] = {}  # by the keys of their jobs
        self._held: dict[str, ModelInUse] = {}  # files that are not removed meanwhile
        self._tasks = TaskSet(failed="training_failed")
        self._stopping = False
        self._suspension = Suspension(lambda: service.activity, self._trainings)
        self.metrics = TrainingCounts(lambda: len(self._trainings), self._suspension.seconds, self._stalled)
        self.threads = len(os.sched_getaffinity(0))

    # --- as trainings see it ---------------------------------------------------------------------

    @property
    def bus(self) -> Bus:
        return self._service.bus

    async def beat_now(self) -> None:
        with contextlib.suppress(RyzansteinError):  # the next one tells
            await self._service.beat_now()

    def trainer_started(self, training: Training) -> None:
        self._suspension.started(training)

    async def ready_base(self, training: Training, job: TrainingJob) -> ReadyBase:
        settings = self._base(job)
        model = await self._models.prepare_base(settings)
        settings = settings.model_copy(update={"model": model})
        key = tenant_key(job.tenant, job.id)
        devices = await self._promise(training, job, settings)
        directory = ""
        if settings.engine != "stub":
            path = await asyncio.to_thread(StoredModel(settings).directory)
            self._held[key] = hold_model(path, settings.store.cache)
            directory = str(path)
        return ReadyBase(settings, directory, self._models.gpu_variables(devices))

    def _base(self, job: TrainingJob) -> ExecutorSettings:
        """Raises `RyzansteinError`."""
        settings = self._settings_of(job)
        most = settings.max_adapter_rank if settings.max_adapters else 0
        if job.hyperparameters.rank > most:
            raise InvalidRequest(
                f"The model {job.model} takes adapters up to the rank {most}, and the job's has "
                f"{job.hyperparameters.rank}; create the job with a smaller rank, or raise the model's "
                "max_adapter_rank (and max_adapters above 0)."
            )
        if job.hyperparameters.replicas > 1 and settings.tp > 1 and not self._memory.devices:
            raise InvalidRequest(
                f"A group of the model {job.model} has {settings.tp} ranks here, and a job of several replicas is "
                "trained where it has one; create the job with one replica."
            )
        return settings

    def _settings_of(self, job: TrainingJob) -> ExecutorSettings:
        """Of a group of its base. Raises `RyzansteinError`."""
        spec = job.base or ModelSpec(job.model, "")
        if spec.source:
            return self._models.settings_of(spec)
        if served_name(self._settings) != spec.name:
            raise ModelNotStored(
                f"The executor {self.instance} was not started with {spec.name}, whose files are elsewhere."
            )
        return self._settings

    async def _promise(self, training: Training, job: TrainingJob, settings: ExecutorSettings) -> tuple[int, ...]:
        """Holds its memory; returns the GPU that it has. Raises `ModelDoesNotFit`."""
        key = tenant_key(job.tenant, job.id)
        held = self._memory.job_devices(key)
        if held is not None:
            return held
        training.memory = await asyncio.to_thread(self._bytes, job, settings)
        return self._memory.place_job(key, training.memory)

    def _bytes(self, job: TrainingJob, settings: ExecutorSettings) -> int:
        if settings.engine == "stub":
            return STUB_BYTES
        stored = StoredModel(settings)
        alone = self._memory.devices or not self._models.serves(job.model)
        base = stored.size().weights if alone else 0
        longest = job.data.longest if job.data is not None else 0
        process = PROCESS + (GPU_OVERHEAD if self._memory.devices else 0)
        config = read_config(stored.directory())
        ranks = 1 if self._memory.devices else settings.tp
        return training_bytes(config, job.hyperparameters, longest, base, process, ranks)

    # --- life ------------------------------------------------------------------------------------

    @property
    def places(self) -> int:
        """Jobs that it takes at a time."""
        return 0 if self._stopping else self._places

    def beat(self) -> dict[str, Any]:
        return {"trains": self.places, "trainings": self.report()}

    def report(self) -> list[HostTraining]:
        return [training.report() for training in self._trainings.values()]

    def _stalled(self) -> float:
        return max((training.stalled_for() for training in self._trainings.values()), default=0.0)

    async def stop(self) -> None:
        """Gives all jobs back, with their states."""
        self._stopping = True
        for training in self._trainings.values():
            training.halt(Halt("given_back", f"The executor {self.instance} was stopped."), LEAVE_WITHIN)
        ends = [asyncio.ensure_future(training.ended.wait()) for training in self._trainings.values()]
        if ends:
            await asyncio.wait(ends, timeout=LEAVE_WITHIN + SETTLE_WITHIN)
        for end in ends:
            end.cancel()
        await self._suspension.close()
        await self._tasks.cancel()

    async def evict(self, keys: Iterable[str]) -> None:
        """Ends these, whose memory a model gets; returns when they are gone."""
        going = [training for key in keys if (training := self._trainings.get(key)) is not None]
        for training in going:
            reason = f"The executor {self.instance} needs its memory for a model."
            training.halt(Halt("given_back", reason, RETRY_AFTER), MAKE_WAY_WITHIN)
        for training in going:
            log.info("training_preempted", job=training.job)
            await training.gone.wait()

    def on_request(self) -> None:
        self._suspension.begin()

    # --- commands --------------------------------------------------------------------------------

    async def on_command(self, command: HostCommand) -> HostReply | None:
        if isinstance(command, StartTraining):
            return await self.start(command)
        return await self.end(command) if isinstance(command, StopTraining) else None

    async def start(self, command: StartTraining) -> HostReply:
        """Raises `RyzansteinError`. What cannot be found out now is asked again."""
        if not self.places:
            raise InvalidRequest(
                f"The executor {self.instance} takes no fine-tuning jobs; start it with RYZANSTEIN_TRAINS above 0."
            )
        key = tenant_key(command.tenant, command.job)
        known = self._trainings.get(key)
        if known is not None:
            if known.attempt < command.attempt:
                known.halt(Halt("not_mine"))
            return HostReply(ok=True)
        if len(self._trainings) >= self._places:
            raise Unavailable(f"The executor {self.instance} has {self._places} fine-tuning jobs already.")
        bucket = training_jobs(self.bus)
        record = LocalJobRecord(bucket, self.instance, command.tenant, command.job, command.attempt)
        try:
            await bucket.ensure()
            job = await record.read()
        except (NotMine, BrokerUnavailable):
            return HostReply(ok=True)
        if key in self._trainings or len(self._trainings) >= self._places:
            return HostReply(ok=True)  # others were faster meanwhile
        training = Training(self, record, self.metrics, command.attempt, job.hosts.index(self.instance))
        self._trainings[key] = training
        try:
            await self._promise_early(training, job)
        except ModelDoesNotFit as error:
            self._forget(key)
            return HostReply(ok=False, code=error.code, error=error.message[:MAX_REASON], memory=training.memory)
        except BaseException:
            self._forget(key)
            raise
        self._tasks.spawn(self._live(key, training), f"training {command.job}")
        return HostReply(ok=True, memory=training.memory)

    async def _promise_early(self, training: Training, job: TrainingJob) -> None:
        """Where the base's files are there: at once, so that the scheduler knows whether there is room."""
        settings = self._base(job)
        if StoredModel(settings).is_ready:
            with contextlib.suppress(OSError):
                await self._promise(training, job, settings)

    async def end(self, command: StopTraining) -> HostReply:
        known = self._trainings.get(tenant_key(command.tenant, command.job))
        if known is not None and known.attempt <= command.attempt:
            with contextlib.suppress(BrokerUnavailable):
                await known.look()
        return HostReply(ok=True)

    async def _live(self, key: str, training: Training) -> None:
        try:
            await self.beat_now()
            await training.run()
        finally:
            self._forget(key)
            training.ended.set()
            await self.beat_now()

    def _forget(self, key: str) -> None:
        self._trainings.pop(key, None)
        self._memory.release_job(key)
        if (held := self._held.pop(key, None)) is not None:
            held.release()


TRAININGS = HostJobKind(HostTrainings, TrainingSettings)
