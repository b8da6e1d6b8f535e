"""Which batches this gateway runs: those that nobody runs, and those whose gateway is lost.

Every gateway watches the bucket. A batch whose record stands still for longer than a lease is taken by
compare-and-set; the time is that of the watcher's own clock, and begins anew with its connection.
"""

import asyncio
import contextlib
import time
from typing import NamedTuple

import structlog

from services.gateway.batches.jobs import LEASE, Jobs, LeaseLost
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.parts import BatchParts
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.states import needs_work
from services.gateway.batches.tasks import end_all
from shared.batches import BatchJob
from shared.bus import Bus
from shared.errors import RyzansteinError

log = structlog.get_logger(__name__)

TICK = 0.5
"""Seconds between two looks at the leases of others."""


class _Seen(NamedTuple):
    """A batch as the bucket has it."""

    job: BatchJob
    revision: int
    at: float
    """Monotonic seconds at which this revision came."""


class Runners:
    """One per gateway."""

    def __init__(self, bus: Bus, jobs: Jobs, parts: BatchParts) -> None:
        self._bus = bus
        self._jobs = jobs
        self._parts = parts
        self._seen: dict[str, _Seen] = {}
        """Batches that somebody has to look after."""
        self._running: dict[str, tuple[BatchRunner, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        bus.on_reconnect(self._count_anew)

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        async for batch, job, revision in self._jobs.watch():
            if self._stopping:
                return
            if job is None or not needs_work(job):
                self._seen.pop(batch, None)
                continue
            self._seen[batch] = _Seen(job, revision, time.monotonic())
            if batch in self._running:
                self._running[batch][0].news(job)
            else:
                self._wake.set()

    async def run(self) -> None:
        """Takes batches, as many as it may. Runs until it is cancelled."""
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK)
            self._wake.clear()
            if not self._bus.connected:
                self._count_anew()
                continue
            for batch in list(self._seen):
                await self._consider(batch)

    async def stop(self) -> None:
        """Leaves its batches to others, who may begin at once."""
        self._stopping = True
        running = list(self._running.values())
        await end_all(task for _, task in running)
        await asyncio.gather(*(runner.release() for runner, _ in running))

    def _count_anew(self) -> None:
        now = time.monotonic()
        self._seen = {batch: seen._replace(at=now) for batch, seen in self._seen.items()}

    async def _consider(self, batch: str) -> None:
        seen = self._seen.get(batch)
        if seen is None or batch in self._running or len(self._running) >= self._parts.settings.batch_jobs:
            return
        job = seen.job
        if job.endpoint not in self._parts.endpoints:  # a newer gateway's
            return
        lost = time.monotonic() - seen.at >= LEASE
        if job.owner not in ("", self._parts.instance) and not lost:
            return
        try:
            lease = await self._jobs.claim(job, seen.revision, self._parts.instance)
        except RyzansteinError as error:
            log.info("batch_not_claimed", batch=batch, error=str(error))
            return
        if lease is None or self._stopping:
            return
        if job.owner:
            self._parts.metrics.taken_over.inc()
        log.info("batch_claimed", batch=batch, of=job.owner)
        runner = BatchRunner(lease, self._parts, LineRunner(self._parts, lambda: len(self._running)))
        task = asyncio.create_task(self._run(batch, runner))
        self._running[batch] = runner, task
        self._parts.metrics.running.set(len(self._running))

    async def _run(self, batch: str, runner: BatchRunner) -> None:
        try:
            await runner.run()
        except LeaseLost:
            log.info("batch_lost", batch=batch)
        except Exception:
            log.exception("batch_runner_failed", batch=batch)
            await runner.release()
        finally:
            self._running.pop(batch, None)
            self._parts.metrics.running.set(len(self._running))
            self._wake.set()
