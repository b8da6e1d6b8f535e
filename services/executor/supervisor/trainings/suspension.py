"""Trainers of a host are suspended while somebody waits for an answer of one of its rings.

    a leader: somebody waits ──▶ all trainers stopped (SIGSTOP) ──▶ the host's page is looked at ─┐
                  ▲                                                  busy: from the beginning ◀───┤
                  └──── armed ◀── all go on (SIGCONT) ◀── idle for `QUIET` ◀──────────────────────┘

Whatever a trainer does stops at once: a step, its reading and packing while it loads, the writing of a state. A GPU
computes the layers that it has in its queue to their end; these are few (`training/trainer/process.py`). A trainer
holds no lock meanwhile that others wait for: the kernel stops a process where it returns to its own code, with none of
the kernel's or a driver's, and files of packed weights are written by whoever comes first, while others do without."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from services.executor.ipc.activity import ActivityPage
from services.executor.supervisor.trainings.training import Training

LOOK = 0.02  # seconds between two looks at the page, while trainers are suspended
# Seconds without interactive requests after which trainers go on: a conversation's next request comes soon.
QUIET = 0.1


class Suspension:
    """Of all trainers of a host."""

    def __init__(self, page: Callable[[], ActivityPage | None], trainings: Mapping[str, Training]) -> None:
        """`page`: of the host, where it trains; `trainings`: those that there are."""
        self._page = page
        self._trainings = trainings
        self._busy_at = 0.0  # when somebody waited last, or the page began to be looked at; seconds of the loop's clock
        self._watching: asyncio.Task[None] | None = None
        self._is_suspended = False

    def begin(self) -> None:
        """Somebody waits for an answer."""
        self._busy_at = asyncio.get_running_loop().time()
        self._is_suspended = True
        for training in self._trainings.values():
            training.suspend()
        self._watch()

    def started(self, training: Training) -> None:
        """It has a trainer from now on. A request that came a moment ago may have told nobody: the page is looked at
        until it has been idle for a while."""
        page = self._page()
        if page is not None and not page.is_idle:
            self._is_suspended = True
        if self._is_suspended:
            training.suspend()
        self._watch()

    def seconds(self) -> float:
        """For which those that are suspended have been, together."""
        return sum(training.suspended_for() for training in self._trainings.values())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    def _watch(self) -> None:
        page = self._page()
        if page is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._look(page), name="suspended trainers")

    async def _look(self, page: ActivityPage) -> None:
        """Until the host was idle for a while, or trains nothing any more."""
        loop = asyncio.get_running_loop()
        self._busy_at = loop.time()
        try:
            while self._trainings:
                if not page.is_idle:
                    self.begin()
                else:
                    page.arm()
                    if loop.time() - self._busy_at >= QUIET:
                        return
                await asyncio.sleep(LOOK)
        finally:
            self._is_suspended = False
            for training in self._trainings.values():
                training.resume()
