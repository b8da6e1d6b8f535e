"""Answers dump and profile requests in the supervisor, on a subject of its own: the leader may be hung.

What a dump or a profile has produced is kept for a while as a job, a few files, to be fetched.
"""

import asyncio
import gzip
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from pathlib import Path

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import ProfileQuestion, ask
from services.executor.supervisor.diagnostics.dump import GroupDump, default_directory, take_dump, write_dump
from services.executor.supervisor.diagnostics.verdict import ProgressAge
from services.executor.supervisor.metrics import Labels, metric
from services.executor.supervisor.ring import Ring
from shared.errors import ConfigurationError, RingLost, RyzansteinError
from shared.messages import RankBeat
from shared.messages.debugging import (
    PIECE_BYTES,
    DebugCommand,
    Dump,
    DumpCommand,
    FetchCommand,
    JobFile,
    JobReply,
    Piece,
    ProfileCommand,
    ProfileSummary,
    ResultCommand,
)
from shared.nats import subjects
from shared.nats.bus import Bus, Subscribed

log = structlog.get_logger(__name__)

MOST_JOBS = 8
MOST_BYTES = 512 << 20  # of all jobs' files
KEPT_FOR = 600.0  # seconds

# Leaves its files in that directory. Raises `RyzansteinError` with the reason where there are none.
Work = Callable[[Path], Awaitable[None]]


class Job:
    def __init__(self, identity: str, directory: Path, work: Work) -> None:
        self.identity = identity
        self.directory = directory
        self.began = time.monotonic()
        self._error = ""
        directory.mkdir()
        self._task = asyncio.create_task(self._run(work))

    @property
    def done(self) -> bool:
        return self._task.done()

    def files(self) -> list[JobFile]:
        return [JobFile(path.name, path.stat().st_size) for path in sorted(self.directory.iterdir())]

    def reply(self) -> JobReply:
        files = self.files() if self.done and not self._error else []
        return JobReply(self.identity, self.done, self._error, files)

    async def remove(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self.directory, True)

    async def _run(self, work: Work) -> None:
        try:
            await work(self.directory)
        except RyzansteinError as error:
            self._error = str(error)
        except Exception as error:
            log.exception("debug_failed")
            what = f"{type(error).__name__}: {error}"
            self._error = f"The dump or profile failed ({what}); the executor's log says where."


class DiagnosticJobs:
    def __init__(self, instance: str) -> None:
        """`instance`: of the executor, by which it knows its own jobs."""
        self._prefix = f"{instance}/"
        self._directory = Path(tempfile.mkdtemp(prefix="ryzanstein-debug-"))
        self._jobs: dict[str, Job] = {}

    async def begin(self, work: Work) -> Job:
        await self._forget_old()
        token = secrets.token_hex(8)
        job = self._jobs[self._prefix + token] = Job(self._prefix + token, self._directory / token, work)
        return job

    def result(self, identity: str) -> JobReply | None:
        """None: it is another executor's."""
        if not identity.startswith(self._prefix):
            return None
        if job := self._jobs.get(identity):
            return job.reply()
        return JobReply(identity, True, "The executor does not have the result any more; ask again.")

    async def piece(self, identity: str, name: str, offset: int, size: int) -> Piece | None:
        """`size` bytes of a job's file; None: it is another executor's."""
        if not identity.startswith(self._prefix):
            return None
        job = self._jobs.get(identity)
        if job is None or not job.done or name not in [file.name for file in job.files()]:
            return Piece(b"")
        return Piece(await asyncio.to_thread(_read, job.directory / name, max(0, offset), size))

    async def close(self) -> None:
        for job in list(self._jobs.values()):
            await job.remove()
        await asyncio.to_thread(shutil.rmtree, self._directory, True)

    async def _forget_old(self) -> None:
        """The oldest that are over, beyond the limits; those that are not over are few by themselves."""
        over = [job for job in self._jobs.values() if job.done]
        size = sum(file.size for job in over for file in job.files())
        for job in over:
            if len(self._jobs) < MOST_JOBS and size <= MOST_BYTES and time.monotonic() < job.began + KEPT_FOR:
                return
            size -= sum(file.size for file in job.files())
            if self._jobs.pop(job.identity, None):
                await job.remove()


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


LOOK = 0.1  # seconds between two looks for what ranks have written
WRITE_TIME = 60.0  # seconds that ranks get to write what they have
MOST_STEPS = 500
MOST_SECONDS = 60.0
MOST_TIMEOUT = 600.0
LEAD_TIME = 0.1  # seconds in which all ranks have heard of it: they begin with the same step after that


def refusal(command: ProfileCommand, settings: ExecutorSettings, ring: Ring | None, group: str) -> str:
    """Why there cannot be such a profile; empty where there can."""
    if settings.engine == "stub":
        return f"The group {group} runs the stub engine, which computes nothing: there is nothing to profile."
    if ring is None or not ring.ready.is_set():
        return f"The group {group} has no ring that is ready; see `ryzanstein debug dump {group}`."
    unknown = [rank for rank in command.ranks if not 0 <= rank < settings.ranks_here]
    if unknown:
        where = " on the host of its leader" if settings.nnodes > 1 else ""
        return f"The group {group} has no rank {unknown[0]}{where}; its ranks are 0 to {settings.ranks_here - 1}."
    if not 0 <= command.steps <= MOST_STEPS or not 0 <= command.seconds <= MOST_SECONDS:
        return f"A profile has at most {MOST_STEPS} steps or {MOST_SECONDS:g} s; ask for less."
    if not command.steps and not command.seconds:
        return "A profile needs a number of steps or seconds; give --steps or --seconds."
    if not 0 < command.timeout <= MOST_TIMEOUT:
        return f"The time-out of a profile must be above 0 s and at most {MOST_TIMEOUT:g} s."
    return ""


async def run_profile(ring: Ring, command: ProfileCommand, ranks: list[int], directory: Path) -> None:
    """Leaves a trace of each rank, and `summary.json`, in `directory`. Raises `RingLost`, `ConfigurationError`."""
    name = f"{time.monotonic_ns():x}"
    answers = {rank: ring.directory / f"profile-{name}-{rank}" for rank in ranks}
    first = _first_step(ring)
    for rank, path in answers.items():
        trace = f"rank-{rank}.trace.json.gz"
        limits = command.steps, command.seconds, command.memory, command.timeout
        ring.ask(rank, ask(ProfileQuestion(str(path), f"{name}-{trace}", *limits, first)))
    await _wait(ring, list(answers.values()), command.timeout + WRITE_TIME)
    found = []
    for rank, path in answers.items():
        summary = msgspec.json.decode(path.read_bytes(), type=ProfileSummary)
        if summary.trace:
            trace = f"rank-{rank}.trace.json.gz"
            await asyncio.to_thread(shutil.move, ring.directory / summary.trace, directory / trace)
            summary = msgspec.structs.replace(summary, trace=trace)
        found.append(summary)
        path.unlink()
    if all(summary.error for summary in found):
        raise ConfigurationError(
            f"There is no profile: {found[0].error}. A ring computes only while it has requests: send some, and ask "
            "again."
        )
    (directory / "summary.json").write_bytes(msgspec.json.encode(found))


def _first_step(ring: Ring) -> int:
    """A step that no rank has begun by the time it hears of it."""
    totals = ring.board.totals
    usual = totals.step_seconds / totals.steps if totals.steps else 0.0
    ahead = min(1000, int(LEAD_TIME / usual)) if usual else 0
    return ring.board.begun(0) + 1 + ahead


async def _wait(ring: Ring, paths: list[Path], timeout: float) -> None:
    end = asyncio.ensure_future(ring.wait_end())
    give_up = time.monotonic() + timeout
    try:
        while not all(path.exists() for path in paths):
            if end.done():
                raise RingLost(f"The ring was lost while it was profiled ({end.result().reason}).")
            if time.monotonic() > give_up:
                raise RingLost("Some ranks have not written their profile in time; see `ryzanstein debug dump`.")
            await asyncio.sleep(LOOK)
    finally:
        end.cancel()


LONGEST_WAIT = 30.0
# Seconds for which a dump that nobody has asked for waits for answers: the ring is to come back soon.
HUNG_WAIT = 0.5
HUNG_LIMIT = 2.0  # seconds after which the ring is taken down without it


class DebugService(Collector):
    def __init__(self, settings: ExecutorSettings, now: Callable[[], tuple[Ring | None, GroupDump]]) -> None:
        """`now`: the ring that is up, if any, and whom it belongs to."""
        self._settings = settings
        self._now = now
        self._still = ProgressAge()
        self._jobs: DiagnosticJobs | None = None
        self._subscribed: Subscribed | None = None
        self._profile: Job | None = None
        self._one_at_a_time = asyncio.Lock()  # each rank has one file for its stacks

    async def start(self, bus: Bus) -> None:
        self._bus = bus
        group = self._now()[1]
        self._jobs = DiagnosticJobs(group.instance)
        subject = subjects.debug(group.group)
        self._subscribed = await bus.subscribe(subject, DebugCommand, self._on_command)  # type: ignore[arg-type]

    async def close(self) -> None:
        if self._subscribed is not None:
            await self._subscribed.unsubscribe()
        if self._jobs is not None:
            await self._jobs.close()

    # --- for the supervisor --------------------------------------------------------------------

    def excuses(self, ring: Ring) -> bool:
        """Whether some rank of the ring is busy with a profile, and stands still for that."""
        now = time.monotonic_ns()
        return any(record.excused_until > now for record in ring.flight.read_all())

    def beats(self, ring: Ring) -> list[RankBeat]:
        """The ranks' progress, as others may judge it."""
        beats = ring.board.beats()
        if not self.excuses(ring):
            return beats
        return [msgspec.structs.replace(beat, in_flight=False) for beat in beats]

    async def before_kill(self, ring: Ring) -> None:
        """Writes down how a ring is that is taken down because it is hung. Raises nothing, and takes
        `HUNG_LIMIT` at most."""
        if not ring.given_up or not self._settings.dump_keep:
            return
        directory = self._settings.dump_directory or default_directory()
        try:
            async with asyncio.timeout(HUNG_LIMIT):
                dump = await self._dump(ring, HUNG_WAIT, ring.given_up)
                path = await asyncio.to_thread(write_dump, directory, dump, self._settings.dump_keep)
            log.warning("dump_written", path=str(path), verdict=dump.verdict)
        except TimeoutError:
            log.warning("dump_timed_out", seconds=HUNG_LIMIT)
        except OSError as error:
            log.warning("dump_write_failed", directory=str(directory), error=str(error))
        except Exception:
            log.exception("dump_failed")

    def collect(self) -> Iterable[Metric]:
        ring, group = self._now()
        count = ring.flight.read(0).slow_steps if ring is not None else 0
        text = "Steps that took much longer than such steps usually do."
        labels = Labels(group.group, group.model)
        yield metric(CounterMetricFamily, "slow_steps", text, Labels._fields, (labels, count))

    # --- commands --------------------------------------------------------------------------------

    async def _on_command(self, command: DebugCommand) -> JobReply | Piece | None:
        assert self._jobs is not None, "it was not started"
        match command:
            case DumpCommand(wait):
                return (await self._jobs.begin(lambda directory: self._save_dump(directory, wait))).reply()
            case ProfileCommand():
                return await self._begin_profile(self._jobs, command)
            case ResultCommand(job):
                return self._jobs.result(job)
            case FetchCommand(job, name, offset):
                size = min(PIECE_BYTES, self._bus.max_payload // 2)
                return await self._jobs.piece(job, name, offset, size)

    async def _begin_profile(self, jobs: DiagnosticJobs, command: ProfileCommand) -> JobReply:
        ring, group = self._now()
        if self._profile is not None and not self._profile.done:
            return JobReply(error=f"A profile of the group {group.group} is under way; ask again when it is over.")
        error = refusal(command, self._settings, ring, group.group)
        if error or ring is None:
            return JobReply(error=error)
        ranks = sorted(set(command.ranks)) or list(range(self._settings.ranks_here))
        self._profile = await jobs.begin(lambda directory: run_profile(ring, command, ranks, directory))
        return self._profile.reply()

    async def _save_dump(self, directory: Path, wait: float) -> None:
        ring, _ = self._now()
        wait = min(max(wait, 0.0), LONGEST_WAIT)
        try:
            async with self._one_at_a_time:
                dump = await self._dump(ring, wait)
        except (OSError, ValueError):  # its memory and files go with it
            if ring is self._now()[0]:
                raise
            dump = await take_dump(None, self._now()[1], self._settings, self._still, wait)
        data = await asyncio.to_thread(lambda: gzip.compress(msgspec.json.encode(dump)))
        (directory / "dump.json.gz").write_bytes(data)

    async def _dump(self, ring: Ring | None, wait: float, reason: str = "") -> Dump:
        self.look(ring)
        return await take_dump(ring, self._now()[1], self._settings, self._still, wait, reason)

    def look(self, ring: Ring | None) -> None:
        """To be called from time to time: a dump says for how long the counters have stood still."""
        if ring is None:
            return
        values: dict[Hashable, object] = {("loop", 0): (ring.epoch, ring.board.loop_beats)}
        for beat in ring.board.beats():
            values["rank", beat.rank] = (ring.epoch, beat.step, beat.progress, beat.in_flight)
        self._still.look(values, time.monotonic())
