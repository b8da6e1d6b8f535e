"""A world: hosts, processes, the network between them and the virtual time in which they live, all from one seed."""

import asyncio
import contextvars
import gc
import itertools
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.core import machine
from tests.simulation.core.loop import Failure, SimulatedLoop
from tests.simulation.core.network import Network
from tests.simulation.core.processes import CURRENT, NEVER, OUTSIDE, Host, Process
from tests.simulation.core.trace import Trace

FIRST_PID = 1000


class World:
    """`machine.install()` must have been called before services are imported."""

    def __init__(self, seed: int) -> None:
        if not gc.get_freeze_count():  # what was imported is not looked through in each run
            gc.collect()
            gc.freeze()
        OUTSIDE.forget()
        self.seed = seed
        self.trace = Trace()
        self.loop = SimulatedLoop(random.Random(f"{seed} order"))
        self.loop.on_failure, self.loop.on_exit = self._failed, self._exited
        self.network = self.loop.network = Network(self.loop, random.Random(f"{seed} network"), self.trace)
        self.hosts: dict[str, Host] = self.network.hosts
        self.processes: list[Process] = []  # in the order of their starts, dead ones too
        self._pids = itertools.count(FIRST_PID)
        self._lives: Counter[str] = Counter()

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.loop._now

    @property
    def failures(self) -> list[Failure]:
        """Exceptions that nobody caught, in processes that were alive; oldest first."""
        return self.loop.failures

    def note(self, kind: str, detail: str = "", *, process: str = "") -> None:
        """Into the trace, as the doing of `process`, else of whose code runs."""
        self.trace.add(self.now, process or CURRENT.get().name, kind, detail)

    # --- hosts ---------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def lose_power(self, host: Host) -> None:
        """All its processes end at once, and nobody hears of it."""
        if not host.powered:
            return
        self.note("power", "lost", process=host.name)
        host.powered, host.power_losses = False, host.power_losses + 1
        self.network.isolate(host.name)
        for process in self.processes:
            if process.host is host and process.alive:
                self._end(process, -signal.SIGKILL, self.network.vanished)

    def restore_power(self, host: Host) -> None:
        """The host is there again, without processes."""
        if not host.powered:
            self.note("power", "restored", process=host.name)
            host.powered = True
            self.network.rejoin(host.name)

    def jump(self, host: Host, seconds: float) -> None:
        """Its clock of the day is set; what measures durations goes on."""
        self.note("clock", f"jumps by {seconds:g} s", process=host.name)
        host.skew += seconds

    def drift(self, host: Host, rate: float) -> None:
        """From now on its clock of the day gains `rate` seconds in each second."""
        self.note("clock", f"gains {rate:g} s in each second", process=host.name)
        host.skew += (host.drift - rate) * self.now
        host.drift = rate

    # --- processes -------------------------------------------------------------------------------------

    def start(self, name: str, host: Host, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        """A process that runs `main`, whose end is not the process's: kill it. What `main` raises is a failure."""
        if not host.powered:
            raise RuntimeError(f"{host.name} has no power: {name} cannot be started there")
        self._lives[name] += 1
        process = Process(name, host, next(self._pids), self._lives[name])
        self.processes.append(process)
        self.note("start", f"{process.pid} on {host.name}", process=name)
        context = process.context()
        task = context.run(self._first_task, main, name, context)
        task.add_done_callback(self._main_ended, context=context)
        process.held.append(task)
        return process

    def _main_ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            told = {"message": "the process's main has failed", "exception": error, "task": task}
            self.loop.call_exception_handler(told)

    def _first_task(self, main: Callable[[], Coroutine[Any, Any, Any]], name: str, context: Any) -> Any:
        return self.loop.create_task(main(), name=name, context=context)

    def kill(self, process: Process, code: int = -signal.SIGKILL) -> None:
        """SIGKILL: nothing of it runs again, and its kernel ends its connections."""
        self._end(process, code, self.network.died)

    def _end(self, process: Process, code: int, connections: Callable[[Process], None]) -> None:
        if not process.alive:
            return
        self.note("kill", str(int(code)), process=process.name)
        process.held = self.loop.tasks_of(process)
        process.alive, process.exit_code = False, int(code)
        self.loop.left(process)
        process.ready.clear()
        process.on_halt, process.halt_at = None, NEVER
        connections(process)
        if process.on_end is not None:
            self.loop.call_soon(process.on_end, context=OUTSIDE.context())

    def pause(self, process: Process) -> None:
        """SIGSTOP: its connections stand, and nobody answers."""
        if process.alive and not process.stopped:
            self.note("pause", process=process.name)
            process.stopped = process.paused = True
            self.loop.left(process)

    def resume(self, process: Process) -> None:
        """SIGCONT: what has arrived meanwhile, and all timers whose time has come, are for it to run now."""
        if process.alive and process.stopped:
            self.note("resume", process=process.name)
            process.stopped = False
            self.loop.resumed(process)

    def starve(self, process: Process, seconds: float) -> None:
        """Its cores are taken: it waits up to so many seconds for each of its turns. 0: as usual again."""
        self.note("starve", f"{seconds:g} s", process=process.name)
        process.starved = seconds

    def signal(self, process: Process, number: int) -> None:
        """As os.kill: its own handler is called; without one it ends, is stopped or goes on."""
        if not process.alive or not number:
            return
        if number == signal.SIGSTOP:
            self.pause(process)
        elif number == signal.SIGCONT:
            self.resume(process)
        elif number in process.signals and number != signal.SIGKILL:
            self.note("signal", str(int(number)), process=process.name)
            handler, args = process.signals[number]
            self.loop.call_soon(handler, *args, context=process.context())
        else:
            self.kill(process, -number)

    async def after_steps(self, process: Process, steps: int, within: float) -> bool:
        """Returns between two steps of a process, after so many more; or after `within` seconds: False.

        It runs nothing until who has waited awaits the next time: just then a fault can strike.
        """
        reached = asyncio.Event()

        def halt() -> None:
            process.halted = process.paused = True
            self.loop.left(process)
            reached.set()

        self.at_step(process, process.steps + steps, halt)
        try:
            async with asyncio.timeout(within):
                await reached.wait()
        except TimeoutError:
            return False
        finally:
            process.on_halt, process.halt_at = None, NEVER
            process.halted = False
            self.loop.resumed(process)
        return True

    def at_step(self, process: Process, steps: int, act: Callable[[], object]) -> None:
        """`act` is called, outside of all processes, once it has run so many callbacks and before the next one."""
        process.halt_at, process.on_halt = steps, act

    # --- the run -----------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs `work`, outside all processes, to its end. Raises what it raises, and `Stuck`.

        Everything stays as it then is, to be looked at, until `close`.
        """
        machine.enter(self.loop, self.seed, self._signalled)
        collects = gc.isenabled()
        gc.disable()  # the loop does it, at the same moments in each run of a seed
        asyncio.set_event_loop(self.loop)
        try:
            return contextvars.Context().run(self.loop.run_until_complete, work)
        finally:
            machine.leave()
            asyncio.set_event_loop(None)
            if collects:
                gc.enable()

    def close(self) -> None:
        """Forgets all that lived in it. What destructors and `finally` still do is nobody's doing."""
        self.loop.ended = True
        for process in self.processes:
            process.alive = False
        unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._forget()
        finally:
            sys.unraisablehook = unraisable

    def _forget(self) -> None:
        self.loop.forget()
        self.network.servers.clear()
        for process in self.processes:
            process.forget()
        self.loop.close()
        gc.collect()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _failed(self, failure: Failure) -> None:
        self.loop.failures.append(failure)
        error = "" if failure.error is None else repr(failure.error)
        self.note("failure", f"{failure.message.splitlines()[0]}: {error}", process=failure.process)

    def _exited(self, process: Process, code: int) -> None:
        if process.alive:
            self.note("exit", str(code), process=process.name)
            self.kill(process, code)

    def _signalled(self, pid: int, number: int) -> None:
        for process in self.processes:
            if process.pid == pid and process.alive:
                if process is CURRENT.get() and number not in process.signals:
                    raise SystemExit(-number)
                self.signal(process, number)
                return
        raise ProcessLookupError(3, os.strerror(3))
