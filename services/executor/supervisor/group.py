"""One group: keeps its ring up, tells the world how it is, takes it down in good order.

    run ─▶ ring ─▶ lost ─▶ ring ─▶ lost ─▶ ...      one after the other, each killed to its last process first
             └──▶ drained, or what no other ring would do better ──▶ the group has ended

It imports no torch and does no work per step: it reads the ring's board once per heartbeat.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping

import structlog

from services.executor.core.gpu_errors import EXTERNAL, HUNG
from services.executor.core.settings import ExecutorSettings, served_name
from services.executor.supervisor.diagnostics.dump import GroupDump
from services.executor.supervisor.diagnostics.processes import is_stopped, with_descendants
from services.executor.supervisor.diagnostics.service import DebugService
from services.executor.supervisor.failure_detection import LoadWatch, RingWatch
from services.executor.supervisor.metrics import HandoverCollector, Labels, RingCollector
from services.executor.supervisor.multinode.head import HeadNode
from services.executor.supervisor.ring import GroupHost, Ring, RingEnd
from shared.errors import BrokerUnavailable, ConfigurationError, RingLost, RyzansteinError, error_from_code
from shared.messages import EngineTraits, GroupBeat, GroupLoad, GroupRecord, GroupWork, RankBeat, RingDeath
from shared.nats import subjects
from shared.nats.kv import Bucket
from shared.service.logs import LevelChange
from shared.tasks import CANCEL_TIMEOUT, Backoff, cancel_all

log = structlog.get_logger(__name__)

HANDOVER_MARGIN = 10.0  # seconds that the last batch of a hand-over may take beyond its time
FORCED_WITHIN = 3.0  # seconds in which a group that is ended by force may hand back what runs
MOST_LOGGED = 8  # suspects that a line of the log names
MOST_DEATHS = 5  # rings that may die before the first one was ready


class GroupSupervisor:
    """One group, from `run` to its end."""

    def __init__(
        self,
        settings: ExecutorSettings,
        group: str,
        host: GroupHost,
        nodes: HeadNode | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`nodes`: the other hosts of its ring. `variables`: of its ranks' environment, whatever ours has."""
        self.settings = settings
        self.group = group
        self.model = served_name(settings)
        self.memory = 0  # bytes that have been promised to it; 0: not known yet
        self._host = host
        self._nodes = nodes
        self._variables = dict(variables or {})
        self._ring: Ring | None = None
        self._message = ""
        self._log_level = LevelChange()
        self._epoch = 0  # of the ring that is up, else of the last one: its end is told under its own epoch
        self._death: RingDeath | None = None  # of the last ring
        self._last_beats: list[RankBeat] = []
        self.ready = asyncio.Event()  # set once a ring of it was ready
        self._deaths = 0
        self._supervision: asyncio.Task[RyzansteinError | None] | None = None
        self._stopping = asyncio.Event()
        self._debug = DebugService(settings, lambda: (self._ring, self._whose()))
        self._rings = RingCollector(
            lambda: self._ring.board if self._ring else None,
            self._labels,
            kernels=lambda: self._ring.kernels if self._ring else "",
        )
        self._handover = HandoverCollector(lambda: self._ring.handover if self._ring else None, self._labels)

    @property
    def collectors(self) -> tuple[RingCollector, DebugService, HandoverCollector]:
        """Its metrics."""
        return self._rings, self._debug, self._handover

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> RyzansteinError | None:
        """Until the group has ended: with what no other ring would do better, or None where it was drained or
        stopped. To be called once."""
        self._supervision = asyncio.create_task(self._supervise(), name=f"supervise {self.group}")
        watching: set[asyncio.Task[None]] = set()
        try:
            await self._debug.start(self._host.bus)
            watching.add(asyncio.create_task(self._watch_progress()))
            await asyncio.wait({self._supervision, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in watching:
                if task.done():
                    task.result()  # which ends with an error alone
            return self._supervision.result()
        finally:
            await cancel_all(watching)
            if not self._supervision.done():  # cancelled, or a fault of ours
                self._give_up("its supervision has ended")
                await asyncio.wait({self._supervision}, timeout=CANCEL_TIMEOUT)
            await self._debug.close()

    async def stop(self, grace: float = -1.0, *, force: bool = False) -> None:
        """Drains the ring, for `grace` seconds (below 0: as set): what runs may finish, what does not is continued
        by another ring. `force`: nothing is waited for. One that is not ready is killed."""
        self._stopping.set()
        ring = self._ring
        if ring is not None and ring.ready.is_set():
            ring.drain(0.0 if force else grace)
            limit = FORCED_WITHIN if force else self._drain_limit(grace)
            await asyncio.wait({asyncio.ensure_future(ring.wait_end())}, timeout=limit)
        self._give_up("the group is stopping")
        if self._supervision is not None:
            await asyncio.wait({self._supervision}, timeout=self._drain_limit(grace))

    def _give_up(self, reason: str) -> None:
        self._stopping.set()
        if self._ring is not None:
            self._ring.lose(reason)

    def set_log_level(self, change: LevelChange) -> None:
        """Rings that start later have it, too."""
        self._log_level = change
        if self._ring is not None:
            self._ring.board.set_log_level(change)

    def _drain_limit(self, grace: float) -> float:
        """Seconds in which a drained ring must be gone: its grace time, its hand-over, and some to leave."""
        handover = self.settings.handover_timeout + HANDOVER_MARGIN if self.settings.handover_timeout else 0.0
        return (self.settings.drain_grace if grace < 0 else grace) + handover + 5

    def _whose(self) -> GroupDump:
        return GroupDump(self.group, self.model, self._host.instance, self._message)

    def _labels(self) -> Labels:
        return Labels(self.group, self.model)

    async def _supervise(self) -> RyzansteinError | None:
        """One ring after the other; each is killed to the last process before the next begins."""
        pauses = Backoff()
        self._epoch = await self._last_epoch()
        while not self._stopping.is_set():
            if not await self._all_hosts():
                return None
            self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
            ring = Ring(self.settings, self.group, self._host, self._epoch, self._nodes, self._variables)
            ring.board.set_log_level(self._log_level)
            pauses.began(time.monotonic())
            try:
                end = await self._live(ring)
                if end.kind != "drained" and not self._stopping.is_set():
                    await self._tell_loss(ring, end)
                    await self._debug.before_kill(ring)
            finally:
                self._ring = None
                await ring.kill()
            if self._stopping.is_set() or end.kind == "drained":
                return None
            if (error := self._final(end)) is not None:
                return error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pauses.next(time.monotonic()))
        return None

    async def _last_epoch(self) -> int:
        """Of the group's last ring that anybody knows of, 0 without one. Epochs are milliseconds, so that they grow
        without a memory; but a group may come back on a host whose clock is behind, and would be taken for old."""
        try:
            groups = await Bucket.open(self._host.bus, subjects.GROUPS_BUCKET, GroupRecord)
            entry = await groups.get(self.group)
        except BrokerUnavailable as error:
            log.warning("last_epoch_unknown", group=self.group, error=str(error))
            return 0
        return 0 if entry is None else entry.value.epoch

    async def _all_hosts(self) -> bool:
        """Waits for the other hosts of the ring; False when the executor ends meanwhile."""
        if self._nodes is None or not self._nodes.missing():
            return True
        hosts = ", ".join(map(str, self._nodes.missing()))
        self._message = f"the ring waits for its host {hosts}" if not self._message else self._message
        log.info("waiting_for_nodes", group=self.group, missing=hosts)
        complete = asyncio.create_task(self._nodes.complete())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({complete, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            complete.cancel()
            stopping.cancel()
        return not self._stopping.is_set()

    async def _tell_loss(self, ring: Ring, end: RingEnd) -> None:
        """At once, and before the processes that are left are ended: others take over meanwhile."""
        self._ring = None
        self._death = death = ring.death(end.cause)
        self._rings.count_death(death.cause)
        self._deaths += 1
        self._message = end.reason
        log.warning(
            "ring_lost",
            group=self.group,
            epoch=self._epoch,
            reason=end.reason,
            cause=death.cause,
            suspects=death.suspects[:MOST_LOGGED],
        )
        await self._host.beat_now()

    async def _live(self, ring: Ring) -> RingEnd:
        self._ring = ring
        await ring.start()
        if self._stopping.is_set():  # while its processes were being started
            ring.lose("the group is stopping")
        await self._host.beat_now()
        ready = asyncio.create_task(ring.ready.wait())
        ended = asyncio.create_task(ring.wait_end())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=self.settings.start_timeout)
            if ready.done():
                self.model, self._message = ring.model, ""
                self._deaths = 0
                self.ready.set()
                log.info("ring_ready", group=self.group, model=ring.model, epoch=ring.epoch)
                await self._host.beat_now()
                self._host.forks.need(ring.imports)
                self._host.forks.start()  # where it has ended meanwhile
            elif not ended.done():
                ring.lose(f"the ring was not ready within {self.settings.start_timeout:g} s")
            return await ended
        finally:
            ready.cancel()
            ended.cancel()

    def _final(self, end: RingEnd) -> RyzansteinError | None:
        """Why there shall be no other ring: another executor has the group's name; a model that has never loaded will
        not load next time either; and a ring that died again and again before it was ever ready is given up."""
        was_ready = self.ready.is_set()
        if end.kind == "failed" and (not was_ready or end.code == ConfigurationError.code):
            error = error_from_code(end.code, end.reason)
            if not error.retryable:
                return error
        if not was_ready and self._deaths >= MOST_DEATHS:
            reason = f"The ring has died {self._deaths} times before it was ready, the last time because {end.reason}."
            remedy = "at that server" if self.settings.engine_url else "at the memory that the model needs"
            return RingLost(f"{reason} Look into the log above, and {remedy}.")
        return None

    # --- watching --------------------------------------------------------------------------------

    async def _watch_progress(self) -> None:
        """Gives the ring up when a rank, or the leader's event loop, has stood still for too long."""
        watch, loading = RingWatch(self.settings.hung_after), LoadWatch()
        while True:
            await asyncio.sleep(min(max(0.5, self.settings.beat_interval / 2), self.settings.hung_after / 4))
            ring = self._ring
            self._debug.look(ring)
            if ring is None:
                continue
            if not ring.ready.is_set():
                if reason := loading.verdict(ring.epoch, ring.board.loading(), time.monotonic()):
                    ring.lose(reason)
                continue
            if self._debug.excuses(ring):
                watch = RingWatch(self.settings.hung_after)
                continue
            board = ring.board
            reason = watch.verdict(ring.epoch, board.loop_beats, board.beats(), time.monotonic())
            if reason:
                ring.lose(reason, _cause_of_standing(ring))

    @property
    def kv_bytes(self) -> int:
        """Most that the KV caches of its ranks take; 0: not known yet."""
        return self._ring.kv_bytes if self._ring is not None else 0

    @property
    def engine(self) -> EngineTraits:
        """What computes, and what it cannot, as far as it has told."""
        traits = self._ring.traits if self._ring is not None else None
        return EngineTraits() if traits is None else traits.engine

    @property
    def loading(self) -> tuple[int, int]:
        """(bytes of the weights that its ranks have read, bytes in all)."""
        parts = self._ring.board.loading() if self._ring is not None else []
        return sum(one.done for one in parts), sum(one.total for one in parts)

    def why_not_ready(self) -> str:
        """Empty where it takes requests."""
        if self._ring is not None and self._ring.ready.is_set():
            return ""
        return self._message or "the ring is starting"

    @property
    def works(self) -> bool:
        """Whether it has requests."""
        load = self._ring.board.load if self._ring is not None else GroupLoad()
        return load.running + load.waiting > 0

    def beat(self) -> GroupBeat:
        """What the heartbeat says of it."""
        ring = self._ring
        if ring is None:
            return GroupBeat(
                self.group,
                self.model,
                self._epoch,
                "starting",
                [],
                GroupLoad(),
                message=self._message,
                death=self._death,
                memory=self.memory,
            )
        ranks = self._debug.beats(ring)
        totals = ring.board.totals
        return GroupBeat(
            group=self.group,
            model=self.model,
            epoch=ring.epoch,
            state="draining" if ring.state == "ready" and self._stopping.is_set() else ring.state,
            ranks=ranks,
            load=ring.board.load,
            loaded=ring.loaded,
            message=self._message or ring.stage,
            work=GroupWork(totals.steps, totals.step_seconds, totals.prompt_tokens + totals.output_tokens),
            kv_bytes=ring.kv_bytes,
            kernels=ring.kernels,
            death=self._death_of(ring, ranks),
            memory=self.memory,
            adapters=ring.adapters,
            streamed=ring.streamed,
            traits=ring.traits,
            connected=ring.board.connected,
        )

    def _death_of(self, ring: Ring, ranks: list[RankBeat]) -> RingDeath | None:
        """The monitor may give a ring up that stands still, before it is given up here."""
        last, self._last_beats = self._last_beats, ranks
        if any(beat.in_flight and beat in last for beat in ranks):
            return ring.death(_cause_of_standing(ring))
        return self._death


def _cause_of_standing(ring: Ring) -> str:
    """Processes that somebody has stopped stand still as well, those of an engine that ranks have started too."""
    return EXTERNAL if any(map(is_stopped, with_descendants(ring.pids))) else HUNG
