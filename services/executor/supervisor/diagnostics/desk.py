"""Where the orchestrator answers whoever looks into its ring, on a subject of its own: the leader may be hung."""

import asyncio
import gzip
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.diagnostics.dump import Group, default_directory, take_dump, write_dump
from services.executor.supervisor.diagnostics.jobs import Job, Jobs, refusal, run_profile
from services.executor.supervisor.diagnostics.verdict import Stillness
from services.executor.supervisor.ring import Ring
from shared.messages import RankBeat
from shared.messages.debugging import (
    PIECE_BYTES,
    DebugCommand,
    Dump,
    DumpCommand,
    FetchCommand,
    JobReply,
    Piece,
    ProfileCommand,
    ResultCommand,
)
from shared.nats import subjects
from shared.nats.bus import Bus

log = structlog.get_logger(__name__)

LOOK_INTERVAL = 0.25
"""Seconds between two looks at the counters of a ring."""
LONGEST_WAIT = 30.0
HUNG_WAIT = 0.5
"""Seconds for which a dump that nobody has asked for waits for answers: the ring is to come back soon."""
HUNG_LIMIT = 2.0
"""Seconds after which the ring is taken down without it."""


class DebugDesk(Collector):
    """One executor's."""

    def __init__(self, settings: ExecutorSettings, now: Callable[[], tuple[Ring | None, Group]]) -> None:
        """`now`: the ring that is up, if any, and whom it belongs to."""
        self._settings = settings
        self._now = now
        self._still = Stillness()
        self._jobs: Jobs | None = None
        self._profile: Job | None = None
        self._one_at_a_time = asyncio.Lock()
        """Each rank has one file for its stacks."""

    async def start(self, bus: Bus) -> None:
        self._bus = bus
        group = self._now()[1]
        self._jobs = Jobs(group.instance)
        await bus.subscribe(subjects.debug(group.group), DebugCommand, self._on_command)  # type: ignore[arg-type]

    async def look(self) -> None:
        """Watches the counters for as long as it is not cancelled: a dump says for how long they stand still."""
        while True:
            self._look_once()
            await asyncio.sleep(LOOK_INTERVAL)

    async def close(self) -> None:
        if self._jobs is not None:
            await self._jobs.close()

    # --- for the orchestrator --------------------------------------------------------------------

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
            log.warning("dump_took_too_long", seconds=HUNG_LIMIT)
        except OSError as error:
            log.warning("dump_not_written", directory=str(directory), error=str(error))
        except Exception:
            log.exception("dump_failed")

    def collect(self) -> Iterable[Metric]:
        ring, group = self._now()
        count = ring.flight.read(0).slow_steps if ring is not None else 0
        counter = CounterMetricFamily(
            "ryzanstein_executor_slow_steps",
            "Steps that took much longer than such steps usually do.",
            labels=("group", "model"),
        )
        counter.add_metric((group.group, group.model), count)
        yield counter

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

    async def _begin_profile(self, jobs: Jobs, command: ProfileCommand) -> JobReply:
        ring, group = self._now()
        if self._profile is not None and not self._profile.done:
            return JobReply(
                error=f"A profile of the group {group.group} is under way; ask again when it is over."
            )
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
        self._look_once(ring)
        return await take_dump(ring, self._now()[1], self._settings, self._still, wait, reason)

    def _look_once(self, ring: Ring | None = None) -> None:
        ring = ring or self._now()[0]
        if ring is None:
            return
        values: dict[Hashable, object] = {("loop", 0): (ring.epoch, ring.board.loop_beats)}
        for beat in ring.board.beats():
            values["rank", beat.rank] = (ring.epoch, beat.step, beat.progress, beat.in_flight)
        self._still.look(values, time.monotonic())
