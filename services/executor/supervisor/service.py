"""The executor service: keeps one ring up, tells the world how it is, takes it down in good order.

It imports no torch and does no work per step: it reads the ring's board once per heartbeat.
"""

import asyncio
import contextlib
import time
from typing import ClassVar

import structlog

from services.executor.core.gpu_errors import EXTERNAL, HUNG
from services.executor.core.settings import ExecutorSettings, served_name
from services.executor.supervisor.diagnostics.dump import Group
from services.executor.supervisor.diagnostics.processes import is_stopped
from services.executor.supervisor.diagnostics.service import DebugService
from services.executor.supervisor.failure_detection import LoadWatch, RingWatch
from services.executor.supervisor.metrics import HandoverCollector, Labels, RingCollector, vllm_aliases
from services.executor.supervisor.multinode.head import HeadNode
from services.executor.supervisor.rank_process import fork_client
from services.executor.supervisor.ring import Ring, RingEnd
from shared.errors import BrokerUnavailable, ConfigurationError, RingLost, error_from_code
from shared.messages import GroupBeat, GroupLoad, GroupRecord, GroupWork, RankBeat, RingDeath, ServiceName
from shared.nats import subjects
from shared.nats.kv import Bucket
from shared.service.endpoints import Health
from shared.service.lifecycle import Service
from shared.service.logs import Change
from shared.tasks import Backoff

log = structlog.get_logger(__name__)

HANDOVER_MARGIN = 10.0
"""Seconds that the last batch of a hand-over may take beyond its time."""
MOST_LOGGED = 8
"""Suspects that a line of the log names."""
MOST_DEATHS = 5
"""Rings that may die before the first one was ready."""


class ExecutorService(Service):
    name: ClassVar[ServiceName] = "executor"

    def __init__(self, settings: ExecutorSettings) -> None:
        super().__init__(settings)
        self._executor_settings = settings
        if not settings.model and settings.engine == "torch":
            raise ConfigurationError(
                "No model is named; give --model or set RYZANSTEIN_MODEL to a directory, a GGUF file "
                "or a hub name."
            )
        self.group = settings.group or self.instance
        self._model = served_name(settings)
        self._nodes = HeadNode(settings) if settings.nnodes > 1 else None
        self._forks = fork_client(settings)
        self._ring: Ring | None = None
        self._message = ""
        self._log_level = Change()
        self._epoch = 0
        """Of the ring that is up, else of the last one: its end is told under its own epoch."""
        self._death: RingDeath | None = None
        """Of the last ring."""
        self._last_beats: list[RankBeat] = []
        self._was_ready = False
        self._deaths = 0
        self._supervision: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._collector = RingCollector(
            lambda: self._ring.board if self._ring else None,
            lambda: Labels(self.group, self._model),
            kernels=lambda: self._ring.kernels if self._ring else "",
        )
        self.registry.register(self._collector)
        self._debug = DebugService(settings, lambda: (self._ring, self._whose()))
        self.registry.register(self._debug)
        if settings.metrics_aliases:
            self.registry.register(vllm_aliases(self._collector))
        self.registry.register(
            HandoverCollector(
                lambda: self._ring.handover if self._ring else None, lambda: Labels(self.group, self._model)
            )
        )

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ranks' imports take longer than anything else at a start: they begin first."""
        self._forks.start()
        try:
            await super().run()
        finally:
            self._forks.close()

    async def start(self) -> None:
        if self._nodes is not None:
            await self._nodes.start()
        await self._debug.start(self.bus)
        self.spawn(self._debug.look(), "debug-look")
        self._supervision = self.spawn(self._supervise(), "supervise")
        self.spawn(self._watch_progress(), "watch-progress")

    async def stop(self) -> None:
        """Drains the ring: what runs may finish; what does not is continued by another ring."""
        self._stopping.set()
        ring = self._ring
        if ring is not None and ring.ready.is_set():
            ring.drain()
            await asyncio.wait({asyncio.ensure_future(ring.wait_end())}, timeout=self._drain_limit)
        elif ring is not None:
            ring.lose("the executor is stopping")
        if self._supervision is not None:
            await asyncio.wait({self._supervision}, timeout=self._drain_limit)
        if self._nodes is not None:
            await self._nodes.stop()
        await self._debug.close()

    def _whose(self) -> Group:
        return Group(self.group, self._model, self.instance, self._message)

    def log_fields(self) -> dict[str, object]:
        return {"group": self.group}

    def on_log_level(self, change: Change) -> None:
        """Rings that start later have it, too."""
        self._log_level = change
        if self._ring is not None:
            self._ring.board.set_log_level(change)

    @property
    def _drain_limit(self) -> float:
        """Seconds in which a drained ring must be gone: its grace time, its hand-over, and some to leave."""
        settings = self._executor_settings
        handover = settings.handover_timeout + HANDOVER_MARGIN if settings.handover_timeout else 0.0
        return settings.drain_grace + handover + 5

    async def _supervise(self) -> None:
        """One ring after the other; each is killed to the last process before the next begins."""
        pauses = Backoff()
        self._epoch = await self._last_epoch()
        while not self._stopping.is_set():
            if not await self._all_hosts():
                return
            self._epoch = max(self._epoch + 1, time.time_ns() // 1_000_000)
            ring = Ring(
                self._executor_settings, self.group, self.instance, self._epoch, self._nodes, self._forks
            )
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
            if self._stopping.is_set() or self._is_final(end):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pauses.next(time.monotonic()))

    async def _last_epoch(self) -> int:
        """Of the group's last ring that anybody knows of, 0 without one. Epochs are milliseconds, so that they grow
        without a memory; but a group may come back on a host whose clock is behind, and would be taken for old."""
        try:
            groups = await Bucket.open(self.bus, subjects.GROUPS_BUCKET, GroupRecord)
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
        self._collector.count_death(death.cause)
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
        await self.beat_now()

    async def _live(self, ring: Ring) -> RingEnd:
        self._ring = ring
        await ring.start()
        await self.beat_now()
        ready = asyncio.create_task(ring.ready.wait())
        ended = asyncio.create_task(ring.wait_end())
        try:
            await asyncio.wait(
                {ready, ended},
                return_when=asyncio.FIRST_COMPLETED,
                timeout=self._executor_settings.start_timeout,
            )
            if ready.done():
                self._was_ready, self._model, self._message = True, ring.model, ""
                self._deaths = 0
                log.info("ring_ready", group=self.group, model=ring.model, epoch=ring.epoch)
                await self.beat_now()
                self._forks.need(ring.imports)
                self._forks.start()  # where it has ended meanwhile
            elif not ended.done():
                ring.lose(f"the ring was not ready within {self._executor_settings.start_timeout:g} s")
            return await ended
        finally:
            ready.cancel()
            ended.cancel()

    def _is_final(self, end: RingEnd) -> bool:
        """A drained group leaves, and so does one whose name another executor has taken; a model that has
        never loaded will not load next time either, and a ring that died again and again before it was
        ever ready is given up."""
        if end.kind == "drained":
            self.end()
            return True
        if end.kind == "failed" and (not self._was_ready or end.code == ConfigurationError.code):
            error = error_from_code(end.code, end.reason)
            if not error.retryable:
                self.fail(error)
                return True
        if not self._was_ready and self._deaths >= MOST_DEATHS:
            reason = f"The ring has died {self._deaths} times before it was ready, the last time because {end.reason}."
            self.fail(RingLost(f"{reason} Look into the log above, and at the memory that the model needs."))
            return True
        return False

    # --- watching --------------------------------------------------------------------------------

    async def _watch_progress(self) -> None:
        """Gives the ring up when a rank, or the leader's event loop, has stood still for too long."""
        watch, loading = RingWatch(self._executor_settings.hung_after), LoadWatch()
        while True:
            await asyncio.sleep(min(0.5, self._executor_settings.hung_after / 4))
            ring = self._ring
            if ring is None:
                continue
            if not ring.ready.is_set():
                if reason := loading.verdict(ring.epoch, ring.board.loading(), time.monotonic()):
                    ring.lose(reason)
                continue
            if self._debug.excuses(ring):
                watch = RingWatch(self._executor_settings.hung_after)
                continue
            board = ring.board
            reason = watch.verdict(ring.epoch, board.loop_beats, board.beats(), time.monotonic())
            if reason:
                ring.lose(reason, _cause_of_standing(ring))

    def group_beats(self) -> list[GroupBeat]:
        return [self._group_beat()]

    def _group_beat(self) -> GroupBeat:
        ring = self._ring
        if ring is None:
            return GroupBeat(
                self.group,
                self._model,
                self._epoch,
                "starting",
                [],
                GroupLoad(),
                message=self._message,
                death=self._death,
            )
        ranks = self._debug.beats(ring)
        totals = ring.board.totals
        return GroupBeat(
            group=self.group,
            model=self._model,
            epoch=ring.epoch,
            state="draining" if ring.state == "ready" and self.state == "draining" else ring.state,
            ranks=ranks,
            load=ring.board.load,
            loaded=ring.loaded,
            message=self._message,
            work=GroupWork(totals.steps, totals.step_seconds, totals.prompt_tokens + totals.output_tokens),
            kv_bytes=ring.kv_bytes,
            kernels=ring.kernels,
            death=self._death_of(ring, ranks),
        )

    def _death_of(self, ring: Ring, ranks: list[RankBeat]) -> RingDeath | None:
        """The monitor may give a ring up that stands still, before it is given up here."""
        last, self._last_beats = self._last_beats, ranks
        if any(beat.in_flight and beat in last for beat in ranks):
            return ring.death(_cause_of_standing(ring))
        return self._death

    def health(self) -> Health:
        base = super().health()
        if not base.ready:
            return base
        if self._ring is None or not self._ring.ready.is_set():
            reason = self._message or "the ring is starting"
            return Health(self.name, self.instance, self.state, ready=False, reason=reason)
        return base


def _cause_of_standing(ring: Ring) -> str:
    """Processes that somebody has stopped stand still as well."""
    return EXTERNAL if any(map(is_stopped, ring.pids)) else HUNG
