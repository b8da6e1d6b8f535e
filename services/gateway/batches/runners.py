"""Which batches this gateway runs: those that nobody runs, and those whose gateway is lost, tenants in turn.

    waiting ──tenant that has the fewest running here, then the one served longest ago, then the oldest──▶ runs
    every place taken, and a tenant waits that has fewer than another ──▶ the other's longest-running batch
                                                                          goes back to the waiting ones

So a tenant's hundred batches hold up nobody else's. Every gateway watches the bucket. A batch whose record stands still
for longer than a lease is taken by compare-and-set; the time is that of the watcher's own clock, and begins anew with
its connection.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog

from services.gateway.batches.dependencies import BatchParts
from services.gateway.batches.jobs import LEASE, Jobs, LeaseLost
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.states import needs_work
from shared.errors import RyzansteinError
from shared.messages.batches import BatchJob
from shared.nats.bus import Bus
from shared.tasks import cancel_all

SHORT_TURN = 10.0
"""Seconds that a batch runs at least where its tenant has two more than the one that waits."""
TURN = 600.0
"""Seconds that it runs at least where its tenant has one more: tenants take turns then."""


class Waiting(NamedTuple):
    """A batch that nobody runs."""

    key: str
    tenant: str
    created_at: float


class Running(NamedTuple):
    """A batch that runs here."""

    key: str
    tenant: str
    began: float


def next_of(
    waiting: Iterable[Waiting], running: Iterable[Running], served: Mapping[str, float]
) -> Waiting | None:
    """The one to run next. `served`: when a batch of each tenant began here last."""
    busy = Counter(item.tenant for item in running)
    return min(
        waiting,
        key=lambda item: (busy[item.tenant], served.get(item.tenant, 0.0), item.created_at, item.key),
        default=None,
    )


def to_yield(waiting: Iterable[Waiting], running: Iterable[Running], now: float) -> Running | None:
    """The running one that makes room for one that waits; None: all is fair, or it is too soon."""
    running = list(running)
    busy = Counter(item.tenant for item in running)
    least = min((busy[item.tenant] for item in waiting), default=None)
    if least is None or not running:
        return None
    most = max(busy.values())
    if most <= least:
        return None
    longest = min((item for item in running if busy[item.tenant] == most), key=lambda item: item.began)
    return longest if now - longest.began >= (TURN if most == least + 1 else SHORT_TURN) else None


log = structlog.get_logger(__name__)

TICK = 0.5
"""Seconds between two looks at the leases of others."""


WAITS = 5.0
"""Seconds that a batch waits for any gateway with a place, before one makes room for it."""
SWEEP_INTERVAL = 60.0


class _Seen(NamedTuple):
    """A batch as the bucket has it."""

    job: BatchJob
    revision: int
    at: float
    """Monotonic seconds at which this revision came."""


class _Run(NamedTuple):
    runner: BatchRunner
    task: "asyncio.Task[None]"
    tenant: str
    began: float


class Runners:
    """One per gateway. Batches are known by their keys in the bucket."""

    def __init__(self, bus: Bus, jobs: Jobs, parts: BatchParts) -> None:
        self._bus = bus
        self._jobs = jobs
        self._parts = parts
        self._seen: dict[str, _Seen] = {}
        """Batches that somebody has to look after."""
        self._running: dict[str, _Run] = {}
        self._served: dict[str, float] = {}
        """When a batch of each tenant began here last."""
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
                self._running[batch].runner.news(job)
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
            await self._fill()

    async def _fill(self) -> None:
        """Takes what waits while there is a place; where there is none, makes one for a tenant that has fewer."""
        now = time.monotonic()
        waiting = {item.key: item for item in self._waiting(now)}
        while waiting and len(self._running) < self._parts.settings.batch_jobs:
            chosen = next_of(waiting.values(), self._runs(), self._served)
            assert chosen is not None, "some wait"
            del waiting[chosen.key]
            await self._take(chosen.key)
        patient = [
            item
            for item in waiting.values()
            if item.key in self._seen and now - self._seen[item.key].at >= WAITS
        ]  # some may have been taken by others meanwhile
        yields = to_yield(patient, self._runs(), now) if not self._stopping else None
        if yields is not None:
            log.info("batch_suspended", batch=yields.key, tenant=yields.tenant)
            run = self._running[yields.key]
            await cancel_all([run.task])
            await run.runner.release()

    def _waiting(self, now: float) -> list[Waiting]:
        return [
            Waiting(key, seen.job.tenant, seen.job.created_at)
            for key, seen in self._seen.items()
            if key not in self._running and self._may_take(seen, now)
        ]

    def _may_take(self, seen: _Seen, now: float) -> bool:
        if seen.job.endpoint not in self._parts.endpoints:  # a newer gateway's
            return False
        return seen.job.owner in ("", self._parts.instance) or now - seen.at >= LEASE

    def _runs(self) -> list[Running]:
        return [Running(key, run.tenant, run.began) for key, run in self._running.items()]

    async def sweep(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            with contextlib.suppress(RyzansteinError):  # next time
                await self._jobs.sweep()

    async def stop(self) -> None:
        """Leaves its batches to others, who may begin at once."""
        self._stopping = True
        running = list(self._running.values())
        await cancel_all([run.task for run in running])
        await asyncio.gather(*(run.runner.release() for run in running))

    def _count_anew(self) -> None:
        now = time.monotonic()
        self._seen = {batch: seen._replace(at=now) for batch, seen in self._seen.items()}

    async def _take(self, key: str) -> None:
        seen = self._seen.get(key)
        if seen is None or self._stopping:
            return
        job = seen.job
        try:
            lease = await self._jobs.claim(key, job, seen.revision, self._parts.instance)
        except RyzansteinError as error:
            log.info("batch_claim_failed", batch=job.id, error=str(error))
            return
        if lease is None or self._stopping:
            return
        if job.owner:
            self._parts.metrics.taken_over.inc()
        log.info("batch_claimed", batch=job.id, of=job.owner)
        runner = BatchRunner(lease, self._parts, LineRunner(self._parts, lambda: len(self._running)))
        task = asyncio.create_task(self._run(key, runner))
        now = self._served[job.tenant] = time.monotonic()
        self._running[key] = _Run(runner, task, job.tenant, now)
        self._parts.metrics.running.set(len(self._running))

    async def _run(self, batch: str, runner: BatchRunner) -> None:
        try:
            await runner.run()
        except LeaseLost:
            log.info("batch_lease_lost", batch=batch)
        except Exception:
            log.exception("batch_runner_failed", batch=batch)
            await runner.release()
        finally:
            self._running.pop(batch, None)
            self._parts.metrics.running.set(len(self._running))
            self._wake.set()
