"""Which jobs of a kind this gateway runs: those that nobody runs, and those whose gateway is lost, tenants in turn.

    waiting ──tenant that has the fewest running here, then the one served longest ago, then the oldest──▶ runs
    every place taken, and a tenant waits that has fewer than another ──▶ the other's longest-running job
                                                                          goes back to the waiting ones

So a tenant's hundred jobs hold up nobody else's. Every gateway watches the bucket. A job whose beat stands still for
longer than a lease is taken by compare-and-set; the time is that of the watcher's own clock, and begins anew with its
connection.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import structlog
from prometheus_client import Counter as EventCounter
from prometheus_client import Gauge

from services.gateway.jobs.leases import LEASE, JobLease, Jobs, JobT, LeaseLost
from shared.errors import RyzansteinError
from shared.messages.jobs import JobRecord
from shared.nats.bus import Bus
from shared.tasks import cancel_all

SHORT_TURN = 10.0  # seconds that a job runs at least where its tenant has two more than the one that waits
TURN = 600.0  # seconds that it runs at least where its tenant has one more: tenants take turns then


class Waiting(NamedTuple):
    """A job that nobody runs."""

    key: str
    tenant: str
    created_at: float


class Running(NamedTuple):
    """A job that runs here."""

    key: str
    tenant: str
    began: float


def next_of(waiting: Iterable[Waiting], running: Iterable[Running], served: Mapping[str, float]) -> Waiting | None:
    """The one to run next. `served`: when a job of each tenant began here last."""
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

TICK = 0.5  # seconds between two looks at the leases of others, while there are jobs
WAITS = 5.0  # seconds that a job waits for any gateway with a place, before one makes room for it
SWEEP_INTERVAL = 60.0


JobIn = TypeVar("JobIn", bound=JobRecord, contravariant=True)


class Runner(Protocol[JobIn]):
    """One job under one lease."""

    async def run(self) -> None:
        """Until there is nothing left to do for it here. Raises `LeaseLost`."""
        ...

    async def release(self) -> None:
        """Another gateway may go on at once."""
        ...

    def news(self, job: JobIn) -> None:
        """Somebody has written the job."""
        ...


@dataclass(frozen=True)
class RunnerSpec(Generic[JobT]):
    """What runners do with jobs of a kind."""

    needs: Callable[[JobT], bool]  # whether some gateway has to look after it
    can: Callable[[JobT], bool]  # whether this one knows how: others may be newer
    places: int  # jobs that a gateway runs at a time
    # Makes one; the second argument says how many run.
    runner: "Callable[[JobLease[JobT], Callable[[], int]], Runner[JobT]]"
    running: Gauge
    taken_over: EventCounter
    turns: bool = True  # whether those that run make room for those that wait


class _Seen(NamedTuple, Generic[JobT]):
    """A job as the bucket has it."""

    job: JobT
    revision: int
    at: float  # monotonic seconds since which its lease stands still


class _Run(NamedTuple, Generic[JobT]):
    runner: Runner[JobT]
    task: "asyncio.Task[None]"
    tenant: str
    began: float


class Runners(Generic[JobT]):
    """One of each work per gateway. Jobs are known by their keys in the bucket."""

    def __init__(self, bus: Bus, jobs: Jobs[JobT], work: RunnerSpec[JobT], instance: str) -> None:
        self._bus = bus
        self._jobs: Jobs[JobT] = jobs
        self._word = jobs.traits.word
        self._work: RunnerSpec[JobT] = work
        self._instance = instance
        self._seen: dict[str, _Seen[JobT]] = {}  # jobs that somebody has to look after
        self._running: dict[str, _Run[JobT]] = {}
        self._served: dict[str, float] = {}  # when a job of each tenant began here last
        self._wake = asyncio.Event()
        self._stopping = False
        bus.on_reconnect(self._count_anew)

    def news(self, key: str, job: JobT | None, revision: int) -> None:
        """What `watch` of the jobs has yielded."""
        if job is not None and key in self._running:
            self._running[key].runner.news(job)
        if job is None or not self._work.needs(job):
            self._seen.pop(key, None)
            return
        if key not in self._running or not self._seen:
            self._wake.set()
        self._seen[key] = _Seen(job, revision, self._still_since(key, job))

    def _still_since(self, key: str, job: JobT) -> float:
        """Others than the owner may write the job too."""
        known = self._seen.get(key)
        if known is not None and known.job.owner == job.owner and known.job.beat == job.beat:
            return known.at
        return time.monotonic()

    async def run(self) -> None:
        """Takes jobs, as many as it may. Runs until it is cancelled."""
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK if self._seen else None):
                    await self._wake.wait()
            self._wake.clear()
            if not self._bus.connected:
                self._count_anew()
                continue
            await self._fill()

    async def _fill(self) -> None:
        """Takes what waits while there is a place; where there is none, makes one for a tenant that has fewer."""
        now = time.monotonic()
        waiting = {item.key: item for item in self._waiting(now)}
        while waiting and len(self._running) < self._work.places:
            chosen = next_of(waiting.values(), self._runs(), self._served)
            assert chosen is not None, "some wait"
            del waiting[chosen.key]
            await self._take(chosen.key)
        patient = [
            item for item in waiting.values() if item.key in self._seen and now - self._seen[item.key].at >= WAITS
        ]  # some may have been taken by others meanwhile
        yields = to_yield(patient, self._runs(), now) if self._work.turns and not self._stopping else None
        if yields is not None:
            log.info(f"{self._word}_suspended", tenant=yields.tenant, **{self._word: yields.key})
            run = self._running[yields.key]
            await cancel_all([run.task])
            await run.runner.release()

    def _waiting(self, now: float) -> list[Waiting]:
        return [
            Waiting(key, seen.job.tenant, seen.job.created_at)
            for key, seen in self._seen.items()
            if key not in self._running and self._may_take(seen, now)
        ]

    def _may_take(self, seen: _Seen[JobT], now: float) -> bool:
        if not self._work.can(seen.job):
            return False
        return seen.job.owner in ("", self._instance) or now - seen.at >= LEASE

    def _runs(self) -> list[Running]:
        return [Running(key, run.tenant, run.began) for key, run in self._running.items()]

    async def stop(self) -> None:
        """Leaves its jobs to others, who may begin at once."""
        self._stopping = True
        self._wake.set()
        running = list(self._running.values())
        await cancel_all([run.task for run in running])
        await asyncio.gather(*(run.runner.release() for run in running))

    def _count_anew(self) -> None:
        now = time.monotonic()
        self._seen = {key: seen._replace(at=now) for key, seen in self._seen.items()}

    async def _take(self, key: str) -> None:
        seen = self._seen.get(key)
        # Another gateway may have taken it while this one took others.
        if seen is None or self._stopping or not self._may_take(seen, time.monotonic()):
            return
        job = seen.job
        try:
            lease = await self._jobs.claim(key, job, seen.revision, self._instance)
        except RyzansteinError as error:
            log.info(f"{self._word}_claim_failed", error=str(error), **{self._word: job.id})
            return
        if lease is None or self._stopping:
            return
        if job.owner:
            self._work.taken_over.inc()
        log.info(f"{self._word}_claimed", of=job.owner, **{self._word: job.id})
        runner = self._work.runner(lease, lambda: len(self._running))
        task = asyncio.create_task(self._run(key, runner))
        now = self._served[job.tenant] = time.monotonic()
        self._running[key] = _Run(runner, task, job.tenant, now)
        self._work.running.set(len(self._running))

    async def _run(self, key: str, runner: Runner[JobT]) -> None:
        try:
            await runner.run()
        except LeaseLost:
            log.info(f"{self._word}_lease_lost", **{self._word: key})
        except Exception:
            log.exception(f"{self._word}_runner_failed", **{self._word: key})
            await runner.release()
        finally:
            self._running.pop(key, None)
            self._work.running.set(len(self._running))
            self._wake.set()


async def sweep(jobs: Jobs[JobT]) -> None:
    """Runs until it is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_INTERVAL)
        with contextlib.suppress(RyzansteinError):  # next time
            await jobs.sweep()
