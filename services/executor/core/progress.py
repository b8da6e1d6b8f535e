"""Counters that grow with each layer that a rank computes: its sign of life within a step.

`ProgressCounter` lies in memory that another process may read, and native code counts in it by its address: a call back
into Python would wait for whatever else the interpreter does, once per layer.

`DeviceProgress` counts what a GPU has done, not what has been launched. A launch returns at once, and the thread that
launches is ahead of the device by a whole step. Were progress counted at the launch, a kernel that never ends (a
collective that another rank does not come to) would look like a finished step. So marks are queued between the kernels,
and the board is told of those that the device has passed:

    launching thread   tick()   tick()    end(step)
                         │ every Nth │        │
    stream        ──k──k─┴▶1──k──k──k┴▶2──k──k┴▶3 ──      a mark: its number is copied to pinned memory
                                         ▲ a hang here leaves 1 there for ever
    this thread   reads 1 ─▶ board: progress = 1, the step in flight: after `hung_after` seconds the ring is hung

The reading thread calls nothing of CUDA, so it can neither wait for the device nor disturb the capture of a graph.
A graph is one launch, and has no marks inside; the end of its step is marked behind it. The leader marks no ends: it
waits for the tokens, and knows (`RankBoard.end`, `RankBoard.launched`).
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class ProgressCounter:
    """One aligned 64-bit integer, with one writer at a time."""

    def __init__(self, cell: "ctypes.Array[ctypes.c_int64]") -> None:
        """`cell` [1]: of the board, say."""
        self._cell = cell

    @classmethod
    def unread(cls) -> "ProgressCounter":
        """For steps that nobody watches."""
        return cls((ctypes.c_int64 * 1)())

    @property
    def count(self) -> int:
        """Layers so far."""
        value: int = self._cell[0]
        return value

    @property
    def address(self) -> int:
        """Of the integer, for native code."""
        return ctypes.addressof(self._cell)

    def tick(self) -> None:
        """A layer was computed."""
        self._cell[0] += 1


NUMBERS = 1024  # numbers that marks have, in turn
TICKS_PER_MARK = 4  # layers: a mark costs the launching thread some 5 us, as much as a kernel
POLL = 0.05  # seconds between two looks while marks are outstanding


class DeviceMarks(Protocol):
    """What can be queued behind a device's work, and read without asking the device."""

    def put(self, number: int) -> None:
        """Queues, behind all that the calling thread's stream has to do, that `number` becomes `last`.

        `number`: 0 to NUMBERS - 1. Does not wait for the device. Raises what torch raises when the device is lost.
        """
        ...

    @property
    def last(self) -> int:
        """The number of the mark that was passed last; 0 before the first."""
        ...

    @property
    def capturing(self) -> bool:
        """What is queued now goes into a graph."""
        ...


class DeviceProgress(ProgressCounter):
    """One rank's. One thread ticks and ends, another one looks."""

    def __init__(
        self,
        cell: "ctypes.Array[ctypes.c_int64]",
        marks: DeviceMarks,
        finished: Callable[[int], None],
        ticks_per_mark: int = TICKS_PER_MARK,
    ) -> None:
        """`cell` counts the marks passed; `finished` is told of each step whose work is done, in their
        order and from the thread that looks."""
        super().__init__(cell)
        self._marks = marks
        self._finished = finished
        self._per_mark = ticks_per_mark
        self._ticks = 0
        self._queued = 0
        self._passed = 0
        self._ends: deque[tuple[int, int]] = deque()  # (the mark behind a step's work, the step)
        self._news = threading.Event()

    def tick(self) -> None:
        """A layer was launched."""
        self._ticks += 1
        if self._ticks % self._per_mark or self._marks.capturing:
            return
        if self._queued - self._passed < NUMBERS // 2:  # else the launches are far ahead: ends alone are marked
            self._put()

    def end(self, step: int) -> None:
        """All work of `step` was launched. To be called outside of a capture."""
        self._ends.append((self._queued + 1, step))
        self._put()

    def look(self) -> bool:
        """Tells what the device has passed; whether that is all."""
        self._passed += (self._marks.last - self._passed) % NUMBERS
        self._cell[0] = self._passed
        while self._ends and self._ends[0][0] <= self._passed:
            self._finished(self._ends.popleft()[1])
        return self._passed == self._queued

    def follow(self, pause: Callable[[float], object]) -> None:
        """Looks for as long as `pause`, which waits for so many seconds, returns nothing true. Costs nothing while no
        mark is outstanding."""
        while True:
            self._news.wait()
            self._news.clear()
            if not self.look():
                self._news.set()
            if pause(POLL):
                return

    def start(self) -> "DeviceProgress":
        """Has a thread look, until the process ends."""
        never = threading.Event()
        thread = threading.Thread(target=self.follow, args=(never.wait,), name="device-progress", daemon=True)
        thread.start()
        return self

    def _put(self) -> None:
        self._queued += 1
        self._marks.put(self._queued % NUMBERS)
        self._news.set()
