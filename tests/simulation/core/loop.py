"""An event loop in virtual time, on which many processes run.

Within a process everything keeps asyncio's order; which process goes next is drawn. Time stands still while anybody
has something to do, then it jumps to the next timer: an hour in which nothing happens costs nothing.

    ready:   gateway-1 [h, h, h]   scheduler-2 [h]   ...      ──one process, all that it has now──▶ run
    timers:  heap by time          ◀── none ready: the clock goes to the first of them
"""

import asyncio
import contextvars
import gc
import heapq
import itertools
import math
import random
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.simulation.core.processes import CURRENT, NEVER, OUTSIDE, NotSimulated, Process

TURNS_AT_ONE_TIME = 1_000_000  # turns after which the clock must have moved: else something spins
# Turns between two collections of garbage: by turns and not by allocations, so that a seed's are always the same.
COLLECT_EVERY = 2_000
KEPT_CANCELLED = 100  # cancelled timers that may lie in the heap however few others there are
THREAD_DELAY = 0.001  # at most so many seconds does a thread's work take, what it sleeps aside


class Stuck(Exception):
    """Nothing can happen any more, or something spins."""


class Failure(NamedTuple):
    """An exception that nobody caught, in a process that was alive."""

    at: float
    process: str
    message: str
    error: BaseException | None


class Callback(asyncio.Handle):
    """As asyncio's, and knows whose it is."""

    __slots__ = ("process",)

    def __init__(self, callback: Any, args: Any, loop: Any, context: contextvars.Context) -> None:
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self.process = context.get(CURRENT, OUTSIDE)


class Timer(asyncio.TimerHandle):
    __slots__ = ("process",)

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: contextvars.Context) -> None:
        self._when, self._scheduled = when, True
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self.process = context.get(CURRENT, OUTSIDE)


class SimulatedTask(asyncio.Task):  # type: ignore[type-arg]  # C's class takes no argument at run time
    """Hashed by its number and not by its address: sets of tasks have the same order in each run of a seed."""

    number: int
    process: Process

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._now = 0.0
        self._draw = draw
        self._busy: list[Process] = []  # with something to run, and neither dead nor paused
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled_timers = 0
        self._turns = 0  # all that there were
        self._spins = 0  # since the clock moved
        self._generators: weakref.WeakKeyDictionary[Any, Process] = weakref.WeakKeyDictionary()
        # Seconds that a thread's work has slept so far; None: the loop's own code runs.
        self.slept: float | None = None
        self.failures: list[Failure] = []
        self.on_failure: Callable[[Failure], None] = self.failures.append
        # Called for a process whose code raises SystemExit.
        self.on_exit: Callable[[Process, int], None] = lambda process, code: None
        self.ended = False  # the run is over: what is destroyed from now on is nobody's failure
        self.network: Any = None  # set by the world: where connections and servers are made

    def time(self) -> float:
        return self._now

    @property
    def turns(self) -> int:
        """How often some process had its turn: the length of a run."""
        return self._turns

    # --- what is to run --------------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = Callback(callback, args, self, contextvars.copy_context() if context is None else context)
        process = handle.process
        if process.alive:
            process.ready.append(handle)
            if not process.busy and not process.paused:
                process.busy = True
                self._busy.append(process)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = Timer(when, callback, args, self, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> Any:
        task = SimulatedTask.__new__(SimulatedTask)
        task.number = next(self._numbers)
        task.process = CURRENT.get() if context is None else context.get(CURRENT, OUTSIDE)
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]  # after its hash
        return task

    def resumed(self, process: Process) -> None:
        """A process may run again, unless something else still holds it."""
        process.paused = process.stopped or process.halted or process.waits
        if process.ready and process.alive and not process.busy and not process.paused:
            process.busy = True
            self._busy.append(process)

    def left(self, process: Process) -> None:
        """A process is dead or paused."""
        if process.busy:
            process.busy = False
            self._busy.remove(process)

    def tasks_of(self, process: Process) -> list[asyncio.Task[Any]]:
        """Those that have not ended, oldest first."""
        own = [task for task in asyncio.all_tasks(self) if task.process is process]  # type: ignore[attr-defined]
        return sorted(own, key=hash)

    # --- running -----------------------------------------------------------------------------------

    def _run_once(self) -> None:
        busy, timers, draw = self._busy, self._timers, self._draw.random
        while not self._stopping:
            if timers and timers[0][0] <= self._now:
                self._expire()
            if not busy:
                self._pass_time()
                continue
            count = len(busy)
            self._turn(busy[int(draw() * count)] if count > 1 else busy[0])
            self._turns += 1
            self._spins += 1
            if not self._turns % COLLECT_EVERY:
                self._collect()

    def _turn(self, process: Process) -> None:
        """All that it has now, as an iteration of a loop of its own."""
        ready = process.ready
        left = len(ready)
        while left and ready and not process.paused:
            if process.steps >= process.halt_at:
                self._halt(process)
                continue
            handle = ready.popleft()
            left -= 1
            if handle._cancelled:
                continue
            process.steps += 1
            callback = handle._callback
            try:
                handle._context.run(callback, *handle._args)
            except KeyboardInterrupt:
                raise
            except SystemExit as exit_:
                self._exited(process, exit_)
            except BaseException as error:
                message = f"exception in callback {callback!r}"
                self.call_exception_handler({"message": message, "exception": error, "handle": handle})
        if process.starved and process.alive:
            self._starve(process)
        elif not ready:
            self.left(process)

    def _starve(self, process: Process) -> None:
        process.waits = process.paused = True
        self.left(process)
        self.call_later(self._draw.random() * process.starved, self._gets_core, process, context=OUTSIDE.context())

    def _gets_core(self, process: Process) -> None:
        process.waits = False
        self.resumed(process)

    def _halt(self, process: Process) -> None:
        """Between two of its steps; what is called may end or pause it."""
        act, process.on_halt, process.halt_at = process.on_halt, None, NEVER
        if act is not None:
            contextvars.Context().run(act)

    def _exited(self, process: Process, exit_: SystemExit) -> None:
        if process is OUTSIDE:
            raise exit_
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        contextvars.Context().run(self.on_exit, process, code)

    def _collect(self) -> None:
        if self._spins > TURNS_AT_ONE_TIME:
            who = ", ".join(sorted(process.name for process in self._busy))
            raise Stuck(f"{who} run for ever at {self._now:.6f} s")
        if not gc.isenabled():
            whole, middle = self._turns % (100 * COLLECT_EVERY), self._turns % (10 * COLLECT_EVERY)
            gc.collect(0 if middle else 1 if whole else 2)

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and (timers[0][2]._cancelled or not timers[0][2].process.alive):
            self._drop(heapq.heappop(timers)[2])
        if not timers or timers[0][0] == math.inf:
            raise Stuck(f"nothing can happen any more at {self._now:.6f} s")
        self._now, self._spins = max(self._now, timers[0][0]), 0
        self._expire()

    def _expire(self) -> None:
        """Timers whose time has come are to run, in the order of their times."""
        timers, now = self._timers, self._now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            process = timer.process
            if timer._cancelled or not process.alive:
                self._drop(timer)
                continue
            timer._scheduled = False
            process.ready.append(timer)
            if not process.busy and not process.paused:
                process.busy = True
                self._busy.append(process)

    def _drop(self, timer: Timer) -> None:
        if timer._cancelled:
            self._cancelled_timers -= 1
        timer._scheduled = False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._cancelled_timers += 1
        if self._cancelled_timers > KEPT_CANCELLED and 2 * self._cancelled_timers > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled and entry[2] is not handle]
            heapq.heapify(self._timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            self._cancelled_timers = 0

    def forget(self) -> None:
        """All that was to run, and all tasks."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.process = OUTSIDE  # type: ignore[attr-defined]
        self._timers.clear()
        self._busy.clear()

    # --- what nobody caught ------------------------------------------------------------------------

    def set_exception_handler(self, handler: Any) -> None:
        CURRENT.get().exception_handler = handler

    def get_exception_handler(self) -> Any:
        return CURRENT.get().exception_handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A failure of the run, unless its process is dead. The process's own handler hears of it too."""
        about = context.get("task") or context.get("future") or context.get("handle")
        process = getattr(about, "process", None) or CURRENT.get()
        if self.ended or not process.alive:
            return
        self.on_failure(Failure(self._now, process.name, context["message"], context.get("exception")))
        if process.exception_handler is not None:
            process.context().run(process.exception_handler, self, context)

    # --- async generators: a dead process's are not closed, for that would run its code -------------

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        self._generators[agen] = CURRENT.get()

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        process = self._generators.pop(agen, None)
        if process is not None and process.alive and not self.ended:
            self.call_soon(self.create_task, agen.aclose(), context=process.context())

    async def shutdown_asyncgens(self) -> None: ...

    # --- what a loop of a real machine does --------------------------------------------------------

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, ssl: Any = None, **named: Any
    ) -> Any:
        if ssl:
            raise NotSimulated("TLS", "connect without")
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, ssl: Any = None, **named: Any
    ) -> Any:
        if ssl:
            raise NotSimulated("TLS", "listen without")
        return self.network.listen(protocol_factory, host, port)

    async def getaddrinfo(self, host: Any, port: Any, **named: Any) -> Any:
        return [(2, 1, 6, "", (host, port))]

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        CURRENT.get().signals[int(sig)] = (callback, args)

    def remove_signal_handler(self, sig: int) -> bool:
        return CURRENT.get().signals.pop(int(sig), None) is not None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Computed at once; its result comes after a moment, and after what it has slept."""
        future = self.create_future()
        result, error, slept = self.in_thread(func, *args)
        self.call_later(slept + self._draw.random() * THREAD_DELAY, settle, future, result, error)
        return future

    def in_thread(self, func: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None, float]:
        """Runs what a thread would: its result, what it raised, and for how many seconds it slept."""
        before, self.slept = self.slept, 0.0
        asyncio._set_running_loop(None)
        try:
            return func(*args), None, self.slept
        except Exception as raised:  # the future has it
            return None, raised, self.slept
        finally:
            self.slept = before
            if before is None:
                asyncio._set_running_loop(self)

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...


def settle(future: Any, result: Any, error: Exception | None) -> None:
    """Gives a future what a thread's work has come to, unless it was cancelled meanwhile."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _refuse(what: str, instead: str) -> Any:
    def refused(self: Any, *args: Any, **named: Any) -> Any:
        raise NotSimulated(what, instead)

    return refused


_SOCKETS = "connect with loop.create_connection, or pass in a stand-in at construction"
_PROCESSES = "give the service a starter that makes a process of the world"
for _name in ("add_reader", "remove_reader", "add_writer", "remove_writer", "sock_recv", "sock_recv_into"):
    setattr(SimulatedLoop, _name, _refuse(f"a file descriptor ({_name})", _SOCKETS))
for _name in ("sock_sendall", "sock_connect", "sock_accept", "sock_sendfile", "sendfile", "start_tls"):
    setattr(SimulatedLoop, _name, _refuse(f"a socket ({_name})", _SOCKETS))
for _name in ("create_datagram_endpoint", "create_unix_connection", "create_unix_server"):
    setattr(SimulatedLoop, _name, _refuse(f"a socket ({_name})", _SOCKETS))
for _name in ("connect_accepted_socket", "connect_read_pipe", "connect_write_pipe"):
    setattr(SimulatedLoop, _name, _refuse(f"a file descriptor ({_name})", _SOCKETS))
for _name in ("subprocess_exec", "subprocess_shell"):
    setattr(SimulatedLoop, _name, _refuse("a process of the machine", _PROCESSES))
