"""Hosts and the processes on them, as the event loop and the network see them.

Whose a callback is, says its context: tasks and timers inherit the one that they were made in. So a process needs no
loop of its own, and everything that it has ever started ends with it.

    running ──pause()──▶ paused ──resume()──▶ running ──kill()──▶ dead: nothing of it runs again, not even `finally`
"""

import asyncio
import contextvars
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NEVER = sys.maxsize


@dataclass(eq=False)
class Host:
    """A machine: a clock, an address and a disk."""

    name: str
    skew: float = 0.0  # seconds that its clock of the day is ahead
    drift: float = 0.0  # seconds that it gains in each second
    powered: bool = True
    power_losses: int = 0  # how often it lost its power: what was written and not synced before may be gone
    # What survives its processes, by whatever name they give to it.
    disk: dict[Any, Any] = field(default_factory=dict)

    def ahead(self, now: float) -> float:
        """Seconds that its clock of the day is ahead at virtual time `now`."""
        return self.skew + self.drift * now


@dataclass(eq=False)
class Process:
    name: str
    host: Host
    pid: int = 1
    life: int = 1  # the first of its name has 1
    alive: bool = True
    # Nothing of it runs for now: it is stopped, halted, or its cores are somebody else's.
    paused: bool = False
    stopped: bool = False  # by SIGSTOP
    halted: bool = False  # between two steps, for somebody who waits for just this moment
    starved: float = 0.0  # at most so many seconds does it wait for a core after each of its turns
    waits: bool = False  # for a core
    # As `subprocess` has it: negative for the signal that ended it. None while it lives.
    exit_code: int | None = None
    # What it is to run next, in this order: as in an event loop of its own.
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    busy: bool = False  # it is among those that the loop draws from
    steps: int = 0  # callbacks of it that have run
    halt_at: int = NEVER  # after so many steps, and before the next one, the loop calls `on_halt`
    on_halt: Callable[[], object] | None = None
    # Its handlers of signals: what to call with which arguments.
    signals: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=dict)
    exception_handler: Callable[..., Any] | None = None  # what it has set as its loop's
    draw: random.Random | None = None  # where its os.urandom comes from; made when it first asks
    # Its tasks when it died. They are kept to the end: no destructor runs code of it.
    held: list[asyncio.Task[Any]] = field(default_factory=list)
    # Called, outside of all processes, when it has died: as a parent hears of its child.
    on_end: Callable[[], object] | None = None

    def context(self) -> contextvars.Context:
        """A fresh context in which everything is this process's."""
        context = contextvars.Context()
        context.run(CURRENT.set, self)
        return context

    def forget(self) -> None:
        """What it was to do, and whom it was to tell."""
        self.ready.clear()
        self.held.clear()
        self.signals.clear()
        self.busy, self.steps, self.halt_at = False, 0, NEVER
        self.on_halt = self.on_end = self.exception_handler = self.draw = None

    def __repr__(self) -> str:
        return f"<process {self.name} on {self.host.name}>"


OUTSIDE = Process("simulator", Host("simulator"))  # what runs the simulation, and is never disturbed

# Whose code runs.
CURRENT: contextvars.ContextVar[Process] = contextvars.ContextVar("process", default=OUTSIDE)


class NotSimulated(RuntimeError):
    """Something that a simulation cannot give; says who asked for what, and what to use instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{CURRENT.get().name} asked for {what}, which no simulation has: {instead}")
