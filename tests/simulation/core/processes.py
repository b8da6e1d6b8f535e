"""Hosts and the processes on them, as the event loop and the network see them.

Whose a callback is, says its context: tasks and timers inherit the one that they were made in. So a process needs no
loop of its own, and everything that it has ever started ends with it.

    running ──pause()──▶ paused ──resume()──▶ running ──kill()──▶ dead: nothing of it runs again, not even `finally`
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Host:
    """A machine: a clock and an address."""

    name: str
    skew: float = 0.0
    """Seconds that its clock of the day is ahead."""


@dataclass(eq=False)
class Process:
    name: str
    host: Host
    alive: bool = True
    paused: bool = False
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    """What it is to run next, in this order: as in an event loop of its own."""
    held: list[asyncio.Task[object]] = field(default_factory=list)
    """Its root tasks. A dead process's are kept to the end: no destructor runs code of it."""

    on_end: Callable[[], object] | None = None
    """Called, outside of all processes, when it has died: as a parent hears of its child."""

    def context(self) -> contextvars.Context:
        """A context in which everything is this process's."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, self)
        return context


OUTSIDE = Process("simulator", Host("simulator"))
"""What runs the simulation, and is never disturbed."""

CURRENT: contextvars.ContextVar[Process] = contextvars.ContextVar("process", default=OUTSIDE)
"""Whose code runs."""
