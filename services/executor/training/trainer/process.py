"""The life of a trainer: reads what it is to train, does what `loop.py` decides, and tells its supervisor.

specification ─▶ base, examples, state ─▶ Loaded ─▶ Stepped, StateWritten, AdapterWritten, ... ─▶ Finished
                                            └─▶ Paused or TrainerFailed, at any time
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import structlog
import torch

from services.executor.collectives.base import Collectives
from services.executor.core import gpu_errors
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import (
    EXAMPLES,
    STATE,
    AdapterWritten,
    Finished,
    Loaded,
    Met,
    Paused,
    StateWritten,
    Stepped,
    TrainerEvent,
    TrainerFailed,
    TrainerPipe,
    TrainerSpec,
)
from services.executor.platforms.base import DeviceEvent
from services.executor.platforms.catalog import choose_platform, platform_of
from services.executor.training.ranks import join_ranks
from services.executor.training.trainer.adapter_files import base_name, check_size, write_adapter, write_metrics
from services.executor.training.trainer.examples import read_examples
from services.executor.training.trainer.loop import Loop
from services.executor.training.trainer.optimizer import FactorOptimizer
from services.executor.training.trainer.replicas import FirstReplica, FurtherReplica
from services.executor.training.trainer.schedule import course_of
from services.executor.training.trainer.state import SavedState, fingerprint, read_state, write_state
from services.executor.training.trainer.steps import SingleReplica, Steps, TrainerReplicas, named_factors
from shared.errors import InternalError, RingLost, RyzansteinError, TrainingDiverged
from shared.messages.training import TrainingData, TrainingMetrics
from shared.service.logs import configure_logging

if TYPE_CHECKING:  # it imports transformers
    from services.executor.training.model import TrainableModel

log = structlog.get_logger(__name__)

METRICS = "steps.csv"  # in the directory

# Layers that a GPU may have in its queue, which is what a request that comes has to wait for: a trainer is suspended
# from outside meanwhile (`supervisor/trainings/suspension.py`), and its GPU computes what it has to the end.
_LAYERS_AHEAD = 2


class PauseWanted(Exception):
    """Somebody wants a pause: the step under way is given up, to be made again."""


class Gate:
    """Between two layers: whether it is to pause, and how far ahead of its GPU it is."""

    def __init__(self, device: torch.device, pause: threading.Event) -> None:
        """`pause`: is set when somebody wants one."""
        self._pause = pause
        self._platform = platform_of(device)
        self._launched: deque[DeviceEvent] = deque()

    def __call__(self) -> None:
        """Raises `PauseWanted`."""
        if self._pause.is_set():
            raise PauseWanted
        if self._platform.is_host:
            return
        event = self._platform.event()
        event.record()
        self._launched.append(event)
        if len(self._launched) > _LAYERS_AHEAD:
            self._launched.popleft().synchronize()


Load = Callable[[TrainerSpec, torch.device, Callable[[], None]], "TrainableModel"]


class Trainer:
    """One attempt at a job."""

    def __init__(
        self,
        spec: TrainerSpec,
        load: Load,
        tell: Callable[[TrainerEvent], None],
        pause: threading.Event,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        ranks: Collectives | None = None,
    ) -> None:
        """Reads base, examples and state. `tell`: the supervisor; `pause`: is set when one is wanted; `clock`: seconds,
        without those in which it is suspended; `ranks`: those that compute with it, of which the first writes. Raises
        `RyzansteinError`."""
        self._spec, self._tell, self._pause, self._clock = spec, tell, pause, clock
        self._job, self._directory = spec.job, Path(spec.directory)
        encoded = (self._directory / EXAMPLES).read_bytes()
        unit = 2 if self._job.method == "dpo" else 1
        data = msgspec.msgpack.decode(encoded, type=TrainingData)
        examples = read_examples(data.training, unit, "training")
        self._validation = read_examples(data.validation, unit, "validation")
        self._fingerprint = fingerprint(self._job, spec.threads, encoded)
        course = course_of(self._job.hyperparameters, examples.units)
        gate = Gate(device, pause)
        self._replicas = _replicas_of(spec, gate, tell)
        model = load(spec, device, gate)
        self._factors = named_factors(model)
        check_size(self._factors)
        self._optimizer = FactorOptimizer(self._factors, self._job.hyperparameters, device, ranks)
        self._writes = spec.rank == 0 and spec.replica == 0
        self._steps = Steps(self._job, model, self._optimizer, examples, course, device, self._replicas)
        self._metrics: list[TrainingMetrics] = self._resumed(device)
        self._loop = Loop(course, len(self._metrics), clock(), spec.state_interval)

    @property
    def done(self) -> int:
        """Steps, those of earlier attempts too."""
        return self._loop.done

    def run(self) -> None:
        """Until the job is trained, or a pause is wanted. Raises `RyzansteinError`."""
        try:
            self._replicas.meet(self.done, self._fingerprint)
            self._run()
        except PauseWanted:  # while others were awaited
            self._tell(Paused(self.done))
        finally:
            self._replicas.close()

    def _run(self) -> None:
        self._tell(Loaded(self.done, self._loop.course.steps))
        while True:
            match self._loop.next(self._clock(), pause=self._pause.is_set()):
                case "compute":
                    self._compute()
                case "save":
                    self._save()
                case "close_epoch":
                    self._close_epoch()
                case "finish":
                    if self._writes:
                        write_metrics(self._directory / METRICS, self._metrics)
                    return self._tell(Finished(METRICS, self._tokens))
                case "rest":
                    return self._tell(Paused(self.done))

    @property
    def _tokens(self) -> int:
        return self._metrics[-1].tokens if self._metrics else 0

    def _resumed(self, device: torch.device) -> list[TrainingMetrics]:
        """The metrics of the steps that an earlier attempt has made, after which factors and moments are as then."""
        path = self._directory / STATE
        if not path.exists():
            return []
        state = read_state(path, self._job.id, self._fingerprint, device)
        if state.factors.keys() != self._factors.keys():
            raise InternalError(
                f"The state {path.name} of the job {self._job.id} has factors of other linears than its base; create "
                "the job again."
            )
        with torch.no_grad():
            for name, factor in self._factors.items():
                factor.copy_(state.factors[name])
        self._optimizer.restore(state.moments)
        return state.metrics

    def _compute(self) -> None:
        began = self._clock()
        try:
            metrics = self._steps.compute(self.done + 1, self._tokens)
        except PauseWanted:
            return
        seconds = max(0.0, self._clock() - began)
        self._metrics.append(msgspec.structs.replace(metrics, seconds=seconds))
        self._loop.computed()
        self._tell(Stepped(self._metrics[-1]))

    def _save(self) -> None:
        began = self._clock()
        if not self._writes:
            self._loop.saved(began, 0.0, 0)
            return
        name = f"state-{self.done}.safetensors"
        state = SavedState(self.done, self._factors, self._optimizer.moments(), self._metrics)
        size, digest = write_state(self._directory / name, self._job.id, self._fingerprint, state)
        self._loop.saved(self._clock(), self._clock() - began, size)
        self._tell(StateWritten(self.done, name, size, digest))

    def _close_epoch(self) -> None:
        """Validates, and writes the adapter."""
        if self._validation.units:
            try:
                means = self._steps.validate(self._validation)
            except PauseWanted:
                return
            self._metrics[-1] = msgspec.structs.replace(
                self._metrics[-1], valid_loss=means.loss, valid_accuracy=means.accuracy, valid_margin=means.margin
            )
            self._tell(Stepped(self._metrics[-1]))
        self._loop.closed()
        if not self._writes:
            return
        name = f"adapter-{self.done}"
        hyperparameters = self._job.hyperparameters
        written = write_adapter(self._directory / name, self._factors, hyperparameters, base_name(self._job))
        told = (self.done, name, written.digest, written.rank, written.bytes, self._metrics[-1])
        self._tell(AdapterWritten(*told, is_result=self._loop.is_whole))


def _replicas_of(
    spec: TrainerSpec, between: Callable[[], None], tell: Callable[[TrainerEvent], None]
) -> TrainerReplicas:
    """Raises `ConfigurationError`, `InternalError`."""
    count = spec.job.hyperparameters.replicas
    if count == 1:
        return SingleReplica()
    if spec.replica:
        return FurtherReplica(spec.replica, count, spec.store, spec.secret, between)
    first = FirstReplica(count, ExecutorSettings.model_validate(spec.settings).ring_host, spec.secret, between)
    tell(Met(first.address))
    return first


def load_base(
    spec: TrainerSpec, device: torch.device, between_layers: Callable[[], None], ranks: Collectives | None = None
) -> "TrainableModel":
    """Raises `ModelLoadError`."""
    from services.executor.training.model import load_trainable

    settings = ExecutorSettings.model_validate(spec.settings)
    job = spec.job
    return load_trainable(
        Path(spec.model_directory),
        settings,
        job.hyperparameters,
        job.seed,
        _threads_of(spec, ranks),
        device,
        between_layers,
        collectives=ranks,
    )


def _threads_of(spec: TrainerSpec, ranks: Collectives | None) -> int:
    """Of each rank: they share those of the job."""
    return spec.threads if ranks is None else max(1, spec.threads // ranks.world_size)


def run(commands: BinaryIO, events_fd: int, load: Load | None = None) -> int:
    """The process, whose standard input is `commands`. Returns its exit code."""
    pipe = TrainerPipe(commands, events_fd)
    spec = pipe.read_spec()
    settings = ExecutorSettings.model_validate(spec.settings)
    configure_logging(
        "executor",
        f"trainer-{spec.job.id}",
        level=settings.log_level,
        fmt=settings.log_format,
        about={"job": spec.job.id, "attempt": spec.job.attempt, **({"rank": spec.rank} if spec.rank else {})},
    )
    pipe.listen()
    device = torch.device(choose_platform(settings.device).name)
    _be_deterministic(device)
    trainer: Trainer | None = None
    try:
        ranks = join_ranks(spec, settings, device, events_fd)
        torch.set_num_threads(_threads_of(spec, ranks))
        tell = pipe.send if ranks.rank == 0 else lambda event: None  # the first rank tells for all
        made = load or partial(load_base, ranks=ranks)
        trainer = Trainer(spec, made, tell, pipe.pause, device, pipe.clock, ranks)
        trainer.run()
    except Exception as error:
        if spec.rank and isinstance(error, RingLost):
            return 1  # it ends because another has, which is told elsewhere
        failed = _told(error, spec.job.id)
        if failed.code == InternalError.code:
            log.exception("trainer_failed")
        done = 0 if trainer is None else trainer.done
        step = done + isinstance(error, TrainingDiverged)
        pipe.send(TrainerFailed(failed.code, str(failed), step))
        return 1
    if spec.rank:  # its end, before the first one's, would be a failure
        threading.Event().wait()
    return 0


def _be_deterministic(device: torch.device) -> None:
    """The same sums in every run. Of a GPU's operators that know no such way a warning is logged, and they run. Memory
    that nobody has written is not filled: nobody reads it, and it takes time."""
    torch.use_deterministic_algorithms(True, warn_only=not platform_of(device).is_host)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _told(error: Exception, job: str) -> RyzansteinError:
    if isinstance(error, RyzansteinError):
        return error
    who = f"The trainer of the job {job}"
    if isinstance(error, MemoryError):
        return InternalError(f"{who} has run out of memory; create the job with a smaller max_tokens or rank.")
    fault = gpu_errors.explain(error, who)
    return fault or InternalError(f"{who} failed: {type(error).__name__}: {error}.")
