"""One job on this host: files in, trainer, files out, and its record kept up to date.

    begun ──▶ examples, state ──▶ trainer ──events──┬─▶ steps ──▶ record, events          every `TELL_EVERY` seconds
                                                    └─▶ states, adapters ──▶ object stores ──▶ record
    halted ─▶ paused or killed ──▶ what comes of it ──▶ record

Of a job that several hosts train the first one does all that; the others wait until the record says where its trainer
is, have theirs compute their parts, and write only why they cannot go on.

What is written at the end is decided by `job_changes`. Training goes on while the broker is away: what is to be told
waits, of several states the newest.
"""

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import (
    PAUSE,
    AdapterWritten,
    Finished,
    Loaded,
    Met,
    StateWritten,
    Stepped,
    TrainerFailed,
    TrainerSpec,
)
from services.executor.supervisor.trainings import job_changes
from services.executor.supervisor.trainings.job_changes import End
from services.executor.supervisor.trainings.job_files import JobFiles
from services.executor.supervisor.trainings.job_record import RETRY, LocalJobRecord, NotMine, patiently
from services.executor.supervisor.trainings.job_storage import STORE_PATIENCE, JobStorage, OverReserved
from services.executor.supervisor.trainings.metrics import TrainingCounts
from services.executor.supervisor.trainings.trainer_process import StartTrainer, TrainerProcess
from shared.errors import InternalError, RyzansteinError, StorageFull, Unavailable, error_from_code
from shared.limits import TRAINING_EVENTS
from shared.messages.registry import HostTraining
from shared.messages.training import TrainingEvent, TrainingJob, TrainingMetrics
from shared.nats.bus import Bus
from shared.nats.training import TrainingEvents
from shared.tasks import cancel_all

TELL_EVERY = 2.0  # seconds between two writings of the record, and between two looks at what its tenant wants
# Seconds that a trainer has to end in good order; then it is killed, and goes on from its last state.
PAUSE_WITHIN = 60.0
WORD_WITHIN = 5.0  # seconds in which the host of a replica that was lost may say why

log = structlog.get_logger(__name__)


class Halt(NamedTuple):
    """Why a training is to end before it is done."""

    kind: Literal["not_mine", "wanted", "given_back"]
    reason: str = ""
    retry_after: float = 0.0  # seconds before a host is told to train it again


class ReadyBase(NamedTuple):
    """A base whose files are ready."""

    settings: ExecutorSettings
    directory: str
    variables: dict[str, str]  # of the trainer's environment


class TrainingHost(Protocol):
    """What a training needs of the host whose it is."""

    instance: str
    threads: int  # that a job is computed with which begins here
    start_trainer: StartTrainer
    state_interval: float  # seconds between two states that trainers write

    @property
    def bus(self) -> Bus: ...

    def trainer_started(self, training: "Training") -> None:
        """Suspends it where somebody waits for an answer."""
        ...

    async def ready_base(self, training: "Training", job: TrainingJob) -> ReadyBase:
        """Has its files made ready, and memory promised. Raises `RyzansteinError`."""
        ...

    async def beat_now(self) -> None: ...


class Training:
    """One attempt at one job. `run` once."""

    def __init__(
        self, host: TrainingHost, record: LocalJobRecord, counts: TrainingCounts, attempt: int, replica: int = 0
    ) -> None:
        """`record` has been read; `replica`: which part of the job is this host's."""
        self._host = host
        self._record = record
        self._counts = counts
        self._events = TrainingEvents(host.bus)
        self.attempt = attempt
        self._replica = replica
        self.job = record.job.id
        self.tenant = record.job.tenant
        self.memory = 0  # bytes that it was promised
        self.ended = asyncio.Event()
        # Set once its trainer has ended, and its memory is free; what it has written may be stored still.
        self.gone = asyncio.Event()
        self._state: Literal["loading", "training", "ending"] = "loading"
        self._step = 0
        self._halt: Halt | None = None
        # Set when a further replica is to say that its host gives the job back, before the first one misses it.
        self._giving_back = asyncio.Event()
        self._process: TrainerProcess | None = None
        self._loading: asyncio.Task[None] | None = None
        # With the attempt, where others say it too.
        self._untold: deque[tuple[TrainingEvent, int]] = deque(maxlen=TRAINING_EVENTS.value)
        self._telling = asyncio.Lock()  # of who publishes them, so that each is published once
        self._metrics: TrainingMetrics | None = None
        self._expected_at = 0.0
        self._first: tuple[int, float] | None = None  # the step that was done first here, and when
        self._storage: JobStorage | None = None
        self._failure: TrainerFailed | None = None
        self._suspended_at: float | None = None
        self._suspended = 0.0  # seconds, without those since then
        # When its trainer was started or has made its last step, and for how long it had been suspended by then.
        self._advanced: tuple[float, float] | None = None
        self._secret = ""

    def report(self) -> HostTraining:
        """What heartbeats say of it."""
        state = self._state if self._suspended_at is None else "yielding"
        return HostTraining(self.job, self.tenant, self.attempt, state, self._step, self.memory, self._replica)

    # --- beside interactive requests -------------------------------------------------------------

    def suspend(self) -> None:
        """Its trainer stands still until `resume`, whatever it does, loading too: its reading and packing take as much
        from others as its steps. One that is to end is not suspended any more: it has seconds for that. Either may be
        said again, and where there is nothing to do."""
        if self._process is None or self._halt is not None or self._suspended_at is not None:
            return
        self._process.suspend()
        self._suspended_at = time.monotonic()

    def resume(self) -> None:
        """It goes on where it was."""
        if self._suspended_at is None:
            return
        seconds = self.suspended_for()
        self._suspended_at = None
        self._suspended += seconds
        self._counts.yielded(seconds)
        if self._process is not None:
            self._process.resume(self._suspended)

    def suspended_for(self) -> float:
        """Seconds since it was suspended; 0 where it is not."""
        return 0.0 if self._suspended_at is None else time.monotonic() - self._suspended_at

    def stalled_for(self) -> float:
        """Seconds since its trainer was started or has made a step, without those in which it was suspended; 0 where
        it has none, or waits for that of the job's first host."""
        if self._advanced is None or self._replica or self._state == "ending":
            return 0.0
        since, suspended = self._advanced
        until = time.monotonic() if self._suspended_at is None else self._suspended_at
        return until - since - (self._suspended - suspended)

    def _advance(self) -> None:
        until = time.monotonic() if self._suspended_at is None else self._suspended_at
        self._advanced = until, self._suspended

    # --- its end ---------------------------------------------------------------------------------

    def halt(self, halt: Halt, within: float = PAUSE_WITHIN) -> None:
        """Ends it; the first reason counts, but for another's training, which is void. `within`: seconds that the
        trainer has to write its state, where that is of use."""
        if self._halt is not None and halt.kind != "not_mine":
            return
        self._halt = halt
        if self._storage is not None:
            self._storage.hurries = True
        if self._loading is not None:
            self._loading.cancel()
        if self._process is None:
            return
        if self._replica and halt.kind == "given_back":
            self._giving_back.set()
            return
        orderly = halt.kind == "given_back" or (halt.kind == "wanted" and self._record.job.wanted == "pause")
        if orderly and self._state == "training":  # else it has nothing to write
            self._process.tell(PAUSE)
            self.resume()
            asyncio.get_running_loop().call_later(within, self._process.kill)
        else:
            self._process.kill()

    async def look(self) -> None:
        """Whether it is still this host's, and what its tenant wants. Raises `BrokerUnavailable`."""
        try:
            job = await self._record.read()
        except NotMine:
            self.halt(Halt("not_mine"))
        else:
            if job.wanted != "run" and not self._replica:
                self.halt(Halt("wanted"))

    # --- its life --------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="ryzanstein-training-") as scratch:
                await self._settle(await self._train(Path(scratch)))
        except NotMine:
            log.warning("training_claimed_elsewhere", job=self.job, attempt=self.attempt)
            self._counts.ended("not_mine")
            if self._storage is not None:
                await self._storage.discard()
        finally:
            self.gone.set()
            self.ended.set()

    async def _train(self, directory: Path) -> End:
        """Until there is nothing more to do, or it has failed or was halted. Raises `NotMine`."""
        try:
            how = await self._run_trainer(directory)
        except NotMine:
            raise
        except StorageFull as error:
            reason = f"There was no room to store what it has learned for {STORE_PATIENCE:g} s: {error.message}"
            return End("failed", reason, StorageFull.code)
        except OverReserved as error:
            return End("failed", error.message, error.code)
        except (RyzansteinError, OSError) as error:
            return End("crashed", str(error))
        except Exception as error:
            log.exception("training_fault", job=self.job)
            return End("crashed", f"Internal error of the executor ({type(error).__name__}); its log says where.")
        finally:
            self._state = "ending"
            self.gone.set()
        return self._end_of(how)

    async def _run_trainer(self, directory: Path) -> str:
        """Starts the trainer, hears it, stores what it writes; how it has ended. Raises `NotMine`, `RyzansteinError`,
        `OSError`, `msgspec.MsgspecError`."""
        if self._record.job.wanted != "run" and not self._replica:
            self._halt = Halt("wanted")
        files = JobFiles(self._host.bus, self.job, self.attempt, directory)
        process = await self._loaded(files, directory) if self._halt is None else None
        if process is None:
            return ""
        self._storage = storage = JobStorage(self._record, files, directory, self._tell_events)
        storing = asyncio.create_task(storage.run())
        telling = asyncio.create_task(self._tell_always())
        hearing = asyncio.create_task(self._hear(process, storage))
        giving = asyncio.create_task(self._giving_back.wait())
        try:
            await asyncio.wait({storing, telling, hearing, giving}, return_when=asyncio.FIRST_COMPLETED)
            if self._giving_back.is_set():
                await self._give_back()
            if not hearing.done():  # the others end with an error alone
                process.kill()
            how = await hearing
            storage.close()
            await asyncio.wait({storing, telling}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
            await storing
            return how
        finally:
            process.kill()
            await cancel_all({storing, telling, hearing, giving})
            await process.end()

    async def _loaded(self, files: JobFiles, directory: Path) -> TrainerProcess | None:
        """The trainer, with all that it needs; None: it was halted before."""
        self._loading = asyncio.create_task(self._start(files, directory))
        loading = self._loading
        try:
            await asyncio.wait({loading})
        finally:
            self._loading = None
            loading.cancel()  # which changes nothing where it is done
        if loading.cancelled():
            if self._halt is not None and self._halt.kind == "not_mine":
                raise NotMine
            return None
        loading.result()
        if self._halt is not None and self._process is not None:
            self._process.kill()
        return self._process

    async def _start(self, files: JobFiles, directory: Path) -> None:
        """Everything before the trainer runs. Raises `RyzansteinError`, `NotMine`, `OSError`."""
        base = await self._host.ready_base(self, self._record.job)
        await patiently(files.open)
        await patiently(self._events.ensure)
        job = await (self._joined(files) if self._replica else self._begun(files))
        self._secret = job.secret
        spec = TrainerSpec(
            job,
            str(directory),
            base.directory,
            base.settings.model_dump(mode="json"),
            job.threads,
            replica=self._replica,
            secret=job.secret,
            store=job.meeting,
            state_interval=self._host.state_interval,
        )
        self._process = await self._host.start_trainer(spec, base.settings, base.variables)
        self._host.trainer_started(self)
        self._advance()
        log.info("trainer_started", job=self.job, attempt=self.attempt, pid=self._process.pid)
        await self._host.beat_now()

    async def _begun(self, files: JobFiles) -> TrainingJob:
        """As the first replica, or the only one: what it goes on from is there, and the record says that it runs.
        Raises as `_start`."""
        before = job = await patiently(self._record.read)
        await files.fetch_examples(job)
        if job.state is not None and not await files.fetch_state(job):
            job = await patiently(lambda: self._record.write(lambda known: replace(known, state=None)))
        await patiently(lambda: files.clear_earlier(job))
        now, threads, runner = time.time(), self._host.threads, self._host.instance
        secret = secrets.token_hex() if job.hyperparameters.replicas > 1 else ""
        if before.runner:
            await self._tell_of_loss(job)
        job = await patiently(
            lambda: self._record.write(lambda known: job_changes.begun(known, runner, before, threads, now, secret))
        )
        self._say("training_started", "Fine-tuning job started", attempt=self.attempt)
        return job

    async def _tell_of_loss(self, job: TrainingJob) -> None:
        """Before the record counts it: whoever goes on where we are lost too finds a loss that was told of, or one that
        is not counted and is told again as the same event."""
        at = job_changes.state_step(job)
        text = f"Executor {job.runner} lost, resumed at step {at} on {self._host.instance}"
        self._say("executor_lost", text, attempt=job.losses + 1)
        await patiently(self._tell_events)

    async def _joined(self, files: JobFiles) -> TrainingJob:
        """As a further replica: once the first one waits for it, what that goes on from is decided. Raises as
        `_start`."""
        job = await self._record_until(lambda job: job.meeting != "")
        await files.fetch_examples(job)
        if job.state is not None and not await files.fetch_state(job):
            raise InternalError("A host that trains part of the job could not read the job's state.")
        return job

    # --- what the trainer says -------------------------------------------------------------------

    async def _hear(self, process: TrainerProcess, storage: JobStorage) -> str:
        """Until its end; how that was."""
        async for event in process.events():
            match event:
                case Met(address):
                    await patiently(lambda: self._record.write(lambda job: replace(job, meeting=address)))
                case Loaded(step, _):
                    self._step, self._state = step, "training"
                    log.info("trainer_loaded", job=self.job, step=step)
                case Stepped(metrics) if self._replica:
                    self._step = metrics.step
                case Stepped(metrics):
                    self._on_step(metrics)
                case StateWritten() | AdapterWritten() | Finished():
                    if not self._replica:
                        storage.add(event)
                case TrainerFailed():
                    self._failure = self._failure or event  # what comes later is because of it
        how = await process.end()
        self.gone.set()
        self.resume()
        self._state = "ending"
        return how

    def _on_step(self, metrics: TrainingMetrics) -> None:
        self._advance()
        now, steps = time.time(), self._record.job.steps
        last, self._metrics = self._metrics, metrics
        if metrics.step != self._step:  # else it is told again, with what it is worth on the validation examples
            self._step = metrics.step
            self._counts.stepped(metrics.tokens - last.tokens if last is not None else 0)
        first, since = self._first = self._first or (metrics.step, now)
        if metrics.step > first:
            self._expected_at = now + (steps - metrics.step) * (now - since) / (metrics.step - first)
        text = f"Step {metrics.step}/{steps}: training loss={metrics.train_loss:.4g}"
        if metrics.valid_loss is not None:
            text += f", validation loss={metrics.valid_loss:.4g}"
        self._say("step", text, metrics)

    # --- what is told ----------------------------------------------------------------------------

    def _say(self, kind: str, message: str, metrics: TrainingMetrics | None = None, attempt: int = 0) -> None:
        """An event of the job. `attempt`: 0 for what every attempt says alike."""
        level: Literal["info", "warn", "error"] = _LEVELS.get(kind, "info")
        event = TrainingEvent(self.job, self._step, kind, level, message, time.time(), metrics)
        self._untold.append((event, attempt))

    async def _tell_always(self) -> None:
        """Raises `NotMine`."""
        while True:
            await asyncio.sleep(TELL_EVERY)
            with contextlib.suppress(Unavailable):  # the broker is away
                await self.look()
                await self._tell()

    async def _tell(self) -> None:
        """Raises `NotMine`, `BrokerUnavailable`."""
        metrics, full = self._metrics, self._storage.full if self._storage is not None else ""
        if metrics is not None:
            expected = self._expected_at
            await self._record.write(lambda job: job_changes.stepped(job, metrics, expected, full))
        await self._tell_events()

    async def _tell_events(self) -> None:
        """Returns once the broker has stored all of them. Raises `BrokerUnavailable`."""
        async with self._telling:
            while self._untold:
                first = self._untold[0]
                await self._events.add(self.tenant, *first)
                if self._untold and self._untold[0] is first:  # else so many came that it has gone
                    self._untold.popleft()

    # --- what comes of it ------------------------------------------------------------------------

    def _end_of(self, how: str) -> End:
        """Unless it is done. `how` the trainer has ended; empty: it was not started."""
        failure = self._failure
        lost = failure is not None and failure.code == Unavailable.code
        if self._replica and (how == DONE or lost or self._giving_back.is_set()):
            return End("left", self._halt.reason if self._halt is not None else "")
        if failure is not None and not error_from_code(failure.code, "").retryable:
            return End("failed", failure.message, failure.code)
        if self._halt is not None:
            return End("given_back", self._halt.reason, retry_after=self._halt.retry_after)
        if failure is not None:
            return End("crashed", failure.message)
        words = self._process.last_words if self._process is not None else ""
        return End("crashed", f"The trainer has ended with {how}{': ' + words if words else '.'}")

    async def _settle(self, end: End) -> None:
        """Writes it. Raises `NotMine`."""
        await patiently(self._tell)
        if self._failure is not None and self._failure.code == Unavailable.code and not self._replica:
            await self._hear_others()
        job = await patiently(lambda: self._record.write(lambda known: self._settled(known, end)))
        result = "finished" if job.result is not None else _RESULTS.get(job.status, end.kind)
        self._counts.ended(result)
        told = {"job": self.job, "attempt": self.attempt, "step": self._step}
        log.info("training_ended", **told, result=result, reason=end.reason if job.result is None else "")
        if job.status in _RESULTS:
            text = job.error.message if job.error is not None else f"Fine-tuning job {job.status}"
            self._say(f"job_{job.status}", text, attempt=self.attempt)
            with contextlib.suppress(Unavailable):  # the record says it too
                await self._events.ensure()  # it may have ended before its start had come so far
                await self._tell_events()
        if end.kind == "left":
            await self._stay()

    async def _give_back(self) -> None:
        """As a further replica, while its trainer still runs: else the first one would find a fault. Raises
        `NotMine`."""
        assert self._halt is not None, "that is why"
        end = End("given_back", self._halt.reason, retry_after=self._halt.retry_after)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_WITHIN):
                await patiently(lambda: self._record.write(lambda job: job_changes.ended(job, end, time.time())))

    async def _hear_others(self) -> None:
        """Another replica was lost: its host knows better why, if it is there. Raises `NotMine` once it has said so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORD_WITHIN):
                await self._record_until(lambda job: False)

    async def _stay(self) -> None:
        """As a further replica, until the first one's host has written what comes of the job, or begins anew: a host
        that shows the job no more is told to train it again."""
        with contextlib.suppress(NotMine):
            await self._record_until(lambda job: job.secret != self._secret or self._halt is not None)

    async def _record_until(self, holds: Callable[[TrainingJob], bool]) -> TrainingJob:
        """Asks again and again for the record. Raises `NotMine`."""
        while not holds(job := await patiently(self._record.read)):  # noqa: ASYNC110  the broker tells nobody here
            await asyncio.sleep(RETRY)
        return job

    def _settled(self, job: TrainingJob, end: End) -> TrainingJob:
        storage = self._storage
        if storage is not None and storage.result is not None and storage.finished is not None:
            tokens = storage.finished.trained_tokens
            return job_changes.finished(job, storage.result, storage.metrics_object, tokens)
        return job_changes.ended(job, end, time.time())


DONE = "code 0"  # how a trainer ends that has done all, or was paused
# Of events that are no mere news, by their kind.
_LEVELS: dict[str, Literal["warn", "error"]] = {"job_failed": "error", "executor_lost": "warn"}
# What comes of a job, by its state.
_RESULTS = {"failed": "failed", "cancelled": "cancelled", "paused": "paused"}
