"""A world: hosts, processes, the network between them and the virtual time in which they live, all from one seed."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.core import machine
from tests.simulation.core.loop import SimulatedLoop
from tests.simulation.core.network import Network
from tests.simulation.core.processes import OUTSIDE, Host, Process


class World:
    """`machine.install()` must have been called before services are imported."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimulatedLoop(random.Random(f"{seed} order"))
        self.network = self.loop.network = Network(self.loop, random.Random(f"{seed} network"))
        self.hosts: dict[str, Host] = {}
        self.processes: list[Process] = []
        """In the order of their starts, dead ones too."""

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self.loop.time()

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def start(self, name: str, host: Host, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        """A process that runs `main`, whose end is not the process's: kill it."""
        process = Process(name, host)
        self.processes.append(process)
        context = process.context()
        task = context.run(self.loop.create_task, main(), name=name, context=context)
        process.held.append(task)
        return process

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing of it runs again, and its connections are reset."""
        if process.alive:
            process.alive = False
            self.loop.left(process)
            process.ready.clear()
            self.network.died(process)
            if process.on_end is not None:
                self.loop.call_soon(process.on_end, context=OUTSIDE.context())

    def pause(self, process: Process) -> None:
        """SIGSTOP: its connections stand, and nobody answers."""
        if process.alive and not process.paused:
            process.paused = True
            self.loop.left(process)

    def resume(self, process: Process) -> None:
        if process.alive and process.paused:
            process.paused = False
            self.loop.resumed(process)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs `work`, outside all processes, to its end. Raises what it raises, and `Stuck`."""
        machine.enter(self.loop, self.seed)
        asyncio.set_event_loop(self.loop)
        try:
            return self.loop.run_until_complete(work)
        finally:
            machine.leave()
            asyncio.set_event_loop(None)
