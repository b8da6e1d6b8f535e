"""Processes that a simulated process starts: with pipes instead of a network, and a parent that sees how they end.

    parent ──standard input──▶ child      lines, which wait while the child is stopped
    parent ◀─────events─────── child      the end of this pipe comes with the child's
    the parent's end ends the child, as PDEATHSIG does

A child is a process of the world as others are: faults kill, stop and continue it by `World`.
"""

import asyncio
import contextvars
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from tests.simulation.core.processes import CURRENT
from tests.simulation.core.world import World
from tests.simulation.deployment import versions

LONGEST_LINE = 1 << 22


class Pipe(asyncio.WriteTransport):
    """Writes into a stream that another process reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reader: asyncio.StreamReader, of: contextvars.Context) -> None:
        """`of`: the reader's process."""
        super().__init__()
        self._loop, self._reader, self._of = loop, reader, of
        self._closed = False

    def write(self, data: Any) -> None:
        if not self._closed:
            self._loop.call_soon(self._reader.feed_data, bytes(data), context=self._of)

    @property
    def transport(self) -> "Pipe":
        """As a `StreamWriter` has it."""
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        """The reader finds the end behind what was written."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._reader.feed_eof, context=self._of)

    def abort(self) -> None:
        self.close()


class Ended(asyncio.ReadTransport):
    """The reading end of a child's pipe, which needs no closing."""

    def close(self) -> None:
        """Its writer is a process of the world: it ends by itself."""


class Child:
    """As its parent sees it (`asyncio.subprocess.Process`), and as its own code does (`commands`, `tell`, `exit`)."""

    def __init__(self, family: "Family", name: str, main: "Main") -> None:
        """In the parent's process."""
        self.world, self._main = family.world, main
        self.returncode: int | None = None
        self._gone = asyncio.Event()
        self._above = CURRENT.get().context()
        self.events = asyncio.StreamReader(LONGEST_LINE)  # the parent's end
        self.stderr = asyncio.StreamReader()  # the parent's end too; only its end ever comes
        self.process = family.world.start(name, CURRENT.get().host, self._run)
        self.process.on_end = self._on_end
        versions.inherit(CURRENT.get(), self.process)
        self.pid = self.process.pid
        self.commands = asyncio.StreamReader(LONGEST_LINE)  # the child's end
        self.stdin = Pipe(self.world.loop, self.commands, self.process.context())
        self._told = Pipe(self.world.loop, self.events, self._above)
        self._family = family

    async def _run(self) -> None:
        self.exit(await self._main(self))

    # --- its own ---------------------------------------------------------------------------------

    def tell(self, line: bytes) -> None:
        """To the parent."""
        self._told.write(line)

    def exit(self, code: int) -> None:
        """It ends, from within or by a signal of its own making (negative): nothing of it runs again."""
        self.world.kill(self.process, code)

    # --- its parent's ----------------------------------------------------------------------------

    def kill(self) -> None:
        self.world.kill(self.process)

    def send_signal(self, number: int) -> None:
        self.world.signal(self.process, number)

    @property
    def is_stopped(self) -> bool:
        return self.process.alive and self.process.stopped

    def descends_from(self, other: "Child") -> bool:
        return self.world is other.world and self.process.name.startswith(f"{other.process.name}/")

    async def wait(self) -> int:
        await self._gone.wait()
        assert self.returncode is not None, "it is set before"
        return self.returncode

    def _on_end(self) -> None:
        """Outside of all processes. What it wrote before arrives first."""
        self._family.forget(self)
        versions.forget(self.process)
        self._told.close()
        self.world.loop.call_soon(self._reaped, context=self._above)

    def _reaped(self) -> None:
        self.returncode = self.process.exit_code
        self.stderr.feed_eof()
        self._gone.set()


# What a child does, in its own process; returns its exit code.
Main = Callable[[Child], Coroutine[Any, Any, int]]


_known: weakref.WeakValueDictionary[int, Child] = weakref.WeakValueDictionary()


def is_stopped(pid: int) -> bool:
    """As /proc says it of real ones."""
    child = _known.get(pid)
    return child is not None and child.is_stopped


def with_descendants(pids: Iterable[int]) -> Iterator[int]:
    """These processes and all that they have started."""
    for pid in pids:
        yield pid
        if (parent := _known.get(pid)) is not None:
            yield from (child.pid for child in [*_known.values()] if child.descends_from(parent))


class Family:
    """All children of a process, which end with it."""

    def __init__(self, world: World) -> None:
        """In the parent's process."""
        self.world = world
        self._children: dict[int, Child] = {}  # those that live, by pid
        parent = CURRENT.get()
        before = parent.on_end

        def ended() -> None:
            if before is not None:
                before()
            for child in [*self._children.values()]:
                child.kill()

        parent.on_end = ended

    def start(self, kind: str, main: Main) -> Child:
        """In the parent's process. Its name is the parent's, a slash and `kind`."""
        child = Child(self, f"{CURRENT.get().name}/{kind}", main)
        self._children[child.pid] = _known[child.pid] = child
        return child

    def forget(self, child: Child) -> None:
        """It has ended."""
        self._children.pop(child.pid, None)
