"""An event loop in virtual time, on which many processes run.

Within a process everything keeps asyncio's order; which process goes next is drawn. Time stands still while anybody
has something to do, then it jumps to the next timer: an hour in which nothing happens costs nothing.

    ready:   gateway-1 [h, h, h]   scheduler-2 [h]   ...      ──one process, all that it has now──▶ run
    timers:  heap by time          ◀── none ready: the clock goes to the first of them
"""

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.simulation.core.processes import CURRENT, OUTSIDE, Process

STEPS_AT_ONE_TIME = 1_000_000
"""Iterations after which the clock must have moved: else something spins."""


class Stuck(Exception):
    """Nothing can happen any more, or something spins."""


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._now = 0.0
        self._draw = draw
        self._busy: list[Process] = []
        """With something to run, and neither dead nor paused."""
        self._steps = 0
        self.network: Any = None
        """Set by the world: where connections and servers are made."""

    def time(self) -> float:
        return self._now

    # --- what is to run --------------------------------------------------------------------------

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._admit(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _admit(self, handle: asyncio.Handle) -> None:
        process = owner_of(handle)
        if not process.alive:
            return
        if not process.ready and not process.paused:
            self._busy.append(process)
        process.ready.append(handle)

    def resumed(self, process: Process) -> None:
        """A process that was paused may run again."""
        if process.ready:
            self._busy.append(process)

    def left(self, process: Process) -> None:
        """A process is dead or paused."""
        if process in self._busy:
            self._busy.remove(process)

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled
        while timers and (timers[0].cancelled() or timers[0].when() <= self._now):
            self._expire(heapq.heappop(timers))
        if not self._busy and not self._stopping:
            self._pass_time(timers)
        if not self._busy:
            return
        self._steps += 1
        if self._steps > STEPS_AT_ONE_TIME:
            raise Stuck(f"{self._busy[0].name} runs for ever at {self._now:.6f} s")
        at = self._draw.randrange(len(self._busy)) if len(self._busy) > 1 else 0
        process = self._busy[at]
        for _ in range(len(process.ready)):
            if not process.ready or not process.alive or process.paused:
                return
            handle = process.ready.popleft()
            if not handle.cancelled():
                handle._run()  # as every loop does
        if not process.ready:
            self.left(process)

    def _pass_time(self, timers: list[asyncio.TimerHandle]) -> None:
        while timers and not self._busy:
            timer = heapq.heappop(timers)
            if not timer.cancelled():
                self._now, self._steps = max(self._now, timer.when()), 0
            self._expire(timer)
        if not self._busy:
            raise Stuck(f"nothing can happen any more at {self._now:.6f} s")

    def _expire(self, timer: asyncio.TimerHandle) -> None:
        timer._scheduled = False  # as every loop does
        if not timer.cancelled():
            self._admit(timer)

    # --- what a loop of a real machine does --------------------------------------------------------

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **named: Any
    ) -> Any:
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **named: Any
    ) -> Any:
        return self.network.listen(protocol_factory, host, port)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Computed at once; its result comes after a moment, and after what it has slept."""
        future = self.create_future()
        before = self._slept
        self._slept = 0.0
        try:
            result, error = func(*args), None
        except Exception as raised:  # the future has it
            result, error = None, raised
        slept, self._slept = self._slept, before
        self.call_later(slept + self._draw.uniform(0, 0.001), _settle, future, result, error)
        return future

    _slept = 0.0

    def sleep(self, seconds: float) -> None:
        """`time.sleep` of code that runs beside the loop."""
        self._slept += seconds

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is dropped when its time comes."""


def _settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def owner_of(handle: asyncio.Handle) -> Process:
    return handle._context.get(CURRENT, OUTSIDE)
