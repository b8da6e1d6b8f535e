"""Work in the background: tasks that are held until they end, pauses before a restart, what shows no sign of life any
more, and turns among tenants."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any, Generic, TypeVar

import structlog

T = TypeVar("T")
Job = TypeVar("Job")

# Seconds that cancelled work has to end; then it is left behind, with an error in the log.
CANCEL_TIMEOUT = 10.0

log = structlog.get_logger(__name__)


class TaskSet:
    """Tasks that run in the background. asyncio itself keeps none of them alive, and tells nobody of their errors."""

    def __init__(self, failed: str = "task_failed", on_failure: Callable[[BaseException], None] | None = None) -> None:
        """`failed`: the log event of a task that ends with an error; empty: whoever waits for the task has the error.
        `on_failure` is called with it."""
        self._failed = failed
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator["asyncio.Task[Any]"]:
        return iter(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> "asyncio.Task[T]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finished(self) -> None:
        """Waits until all have ended, also those that begin meanwhile. Raises none of their errors."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancels all and waits for their ends."""
        await cancel_all(self._tasks)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if self._failed:
                log.error(self._failed, task=task.get_name(), error=str(error), exc_info=error)
            if self._on_failure is not None:
                self._on_failure(error)


async def cancel_all(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Ends `tasks`, which may shrink meanwhile. Cancels more than once, since `asyncio.wait_for` of Python 3.11 can
    swallow a cancellation that meets its result."""
    give_up = asyncio.get_running_loop().time() + CANCEL_TIMEOUT
    while left := [task for task in tasks if not task.done()]:
        if asyncio.get_running_loop().time() >= give_up:
            log.error("tasks_did_not_stop", tasks=[task.get_name() for task in left])
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.5)


class Backoff:
    """How long to wait before something that has ended is started again. Pure: time comes in, in seconds."""

    FIRST = 0.2  # seconds; the pause doubles with each end
    STABLE_AFTER = 60.0  # what has lived for so long begins with the first pause again

    def __init__(self, longest: float = 10.0) -> None:
        self._longest = longest
        self._pause = self.FIRST / 2
        self._began: float | None = None

    def began(self, now: float) -> None:
        self._began = now

    def next(self, now: float) -> float:
        """It has ended, or could not be started: the seconds to wait."""
        if self._began is not None and now - self._began > self.STABLE_AFTER:
            self._pause = self.FIRST / 2
        self._began = None
        self._pause = min(self._pause * 2, self._longest)
        return self._pause


class Watched:
    """Something that a `Watchdog` watches; its owner sets `seen` to the loop's time at each sign of life."""

    __slots__ = ("lost", "patience", "seen")

    def __init__(self, lost: Callable[[], object], patience: float, seen: float) -> None:
        self.lost = lost
        self.patience = patience
        self.seen = seen


class Watchdog:
    """Tells of what shows no sign of life for its `patience`, with one timer for all. A sign arms nothing: the timer
    looks when the first one could be lost, and at what has shown signs since, once more when that could be."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, lost: Callable[[], object], patience: float) -> Watched:
        """Calls `lost` once, `patience` seconds after the last sign, unless `forget` is called before."""
        alive = Watched(lost, patience, asyncio.get_running_loop().time())
        self._watched.add(alive)
        self._arm()
        return alive

    def forget(self, alive: Watched) -> None:
        """Safe to call twice, and after it is lost."""
        self._watched.discard(alive)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        due = min(alive.seen + alive.patience for alive in self._watched)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for alive in [one for one in self._watched if one.seen + one.patience <= now]:
            self._watched.discard(alive)
            alive.lost()
        if self._watched:
            self._arm()


class RoundRobin(Generic[Job]):
    """Jobs of tenants that share one worker: each tenant in turn, whatever the others have waiting. Pure, and not for
    several threads at a time.

    tenant a   j1 j2 j3 ┐
    tenant b   j4       ├─▶ j1 j4 j5 j2 j6 j3
    tenant c   j5 j6    ┘
    """

    def __init__(self) -> None:
        # By tenant; the first one's turn is next. None is empty.
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return len(self._waiting.get(tenant, ()))

    def add(self, tenant: str, job: Job) -> None:
        self._waiting.setdefault(tenant, deque()).append(job)

    def peek(self) -> Job | None:
        """What `next` would return."""
        return next(iter(self._waiting.values()))[0] if self._waiting else None

    def next(self) -> Job | None:
        """The job whose turn it is; None: none waits."""
        if not self._waiting:
            return None
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        return job
