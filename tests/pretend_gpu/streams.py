"""Streams, events, and copies between host and device that are not done before somebody waits for them.

What a stream has been given counts up; a clock says up to where each stream's work is known to be over, or to come
before what is given next.

    stream A   1 2 3 ─ record ─▶ event {A: 3} ─ wait ─▶ stream B's clock {A: 3, B: 7}
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Clock = dict["Stream", int]


class Misuse(AssertionError):
    """What would be wrong on a GPU, or slow, without any error there."""


def join(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class Stream:
    all: "weakref.WeakSet[Stream]" = weakref.WeakSet()

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.given = 0
        self.clock: Clock = {}
        Stream.all.add(self)

    def now(self) -> Clock:
        return {**self.clock, self: self.given}

    def wait_stream(self, other: "Stream") -> None:
        join(self.clock, other.now())

    def wait_event(self, event: "Event") -> None:
        join(self.clock, event.clock)

    def synchronize(self) -> None:
        HOST.wait(self.now(), "Stream.synchronize")


class Event:
    """One that has happened until it is recorded."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: Clock = {}
        self._timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or HOST.stream).now()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or HOST.stream).wait_event(self)

    def synchronize(self) -> None:
        HOST.wait(self.clock, "Event.synchronize", expected=True)

    def query(self) -> bool:
        HOST.arrive(self.clock)
        return True

    def elapsed_time(self, other: "Event") -> float:
        if not self._timing:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1.0


class _Copy(NamedTuple):
    """Between pinned memory and the device, under way."""

    stream: Stream
    number: int
    arrive: Callable[[], None]
    source: int  # the pinned memory that it reads; 0: it writes some
    into: tuple[int, int]  # the pinned bytes [first, end) that it writes


class _Use(NamedTuple):
    """Of bytes [first, end) of the device's memory."""

    first: int
    end: int
    stream: Stream
    number: int
    writes: bool


class Host:
    """What a process knows of its device: the streams, what is under way, and which memory is whose."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._thread = threading.local()
        self._lock = threading.RLock()
        # What the host has waited for comes before all that is given later, to any stream.
        self._done: Clock = {}
        self.default = Stream()
        self._copies: list[_Copy] = []
        self._uses: dict[int, list[_Use]] = {}
        self._pinned: dict[int, Tensor] = {}
        # What the host has waited for the device with, events excepted, since this was emptied last.
        self.waits: list[str] = []

    # --- of the calling thread -------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        found: Stream = getattr(self._thread, "stream", self.default)
        return found

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._thread.stream = stream

    @property
    def recording(self) -> Any:
        """The graph that takes what is launched; None: it is done."""
        return getattr(self._thread, "recording", None)

    @recording.setter
    def recording(self, graph: Any) -> None:
        self._thread.recording = graph

    # --- waiting ---------------------------------------------------------------------------------

    def wait(self, clock: Clock, by: str, *, expected: bool = False) -> None:
        """`expected`: the program says that it waits."""
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing ({by})")
        if not expected:
            self.waits.append(by)
        self.arrive(clock)

    def wait_for_stream(self, by: str) -> None:
        self.wait(self.stream.now(), by)

    def wait_for_all(self, by: str) -> None:
        self.wait({stream: stream.given for stream in list(Stream.all)}, by)

    def arrive(self, clock: Clock) -> None:
        """Has copies that are over by `clock` be seen."""
        with self._lock:
            join(self._done, clock)
            self._end([copy for copy in self._copies if copy.number <= clock.get(copy.stream, 0)])

    # --- pinned memory ---------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[_memory(tensor)] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return _memory(tensor) in self._pinned

    def from_pinned(self, source: Tensor) -> None:
        """A copy out of `source` begins, which must stay as it is until it is over."""
        self._copied_before(source)
        was = source.clone()

        def arrive() -> None:
            if not torch.equal(_bits(source), _bits(was)):
                raise Misuse("pinned memory was written to while the device may still have been copying from it")

        self._under_way(arrive, _memory(source))

    def to_pinned(self, target: Tensor, content: Tensor) -> None:
        """A copy into `target` begins, which holds what it did until it is over."""
        with self._lock:  # what reads this memory comes before: from here on it may change
            self._end([copy for copy in self._copies if copy.source == _memory(target)])
        taken = content.clone()
        first = target.data_ptr()

        def arrive() -> None:
            with torch.inference_mode():  # a device writes to whatever memory it is told to
                target.copy_(taken)

        self._under_way(arrive, into=(first, first + target.nbytes))

    def _copied_before(self, source: Tensor) -> None:
        """The device reads `source` after what this stream comes behind has been written to it."""
        first, clock = source.data_ptr(), self.stream.now()
        with self._lock:
            found = [c for c in self._copies if c.into[0] < first + source.nbytes and first < c.into[1]]
            if any(copy.number > clock.get(copy.stream, 0) for copy in found):
                raise Misuse("the device copies from pinned memory that another stream may still be copying to")
            self._end(found)

    def _end(self, over: list[_Copy]) -> None:
        """Under the lock: no other thread finds copies gone, and what they carry not there."""
        self._copies = [copy for copy in self._copies if copy not in over]
        for copy in over:
            copy.arrive()

    def _under_way(self, arrive: Callable[[], None], source: int = 0, into: tuple[int, int] = (0, 0)) -> None:
        self.stream.given += 1
        with self._lock:
            self._copies.append(_Copy(self.stream, self.stream.given, arrive, source, into))

    # --- memory of the device --------------------------------------------------------------------

    def use(self, tensor: Tensor, by: str, *, writes: bool) -> None:
        """Raises `Misuse` where another stream may be at it."""
        if not tensor.is_contiguous():
            return  # between its numbers lie others, which may well be another stream's
        stream, first = self.stream, tensor.data_ptr()
        new = _Use(first, first + tensor.nbytes, stream, stream.given, writes)
        with self._lock:
            uses = self._uses.setdefault(_memory(tensor), [])
            for old in uses:
                apart = old.end <= new.first or new.end <= old.first or not (old.writes or writes)
                known = max(stream.clock.get(old.stream, 0), self._done.get(old.stream, 0))
                if not apart and old.stream is not stream and old.number > known:
                    raise Misuse(f"{by} and another stream use the same memory and do not wait for each other")
            # What lies within the new use and came before it is known to have, from now on.
            uses[:] = [old for old in uses if not (writes and new.first <= old.first and old.end <= new.end)]
            if not any(old == new._replace(number=old.number) for old in uses):
                uses.append(new)
            else:
                uses[:] = [new if old == new._replace(number=old.number) else old for old in uses]

    def forget(self, tensor: Tensor) -> None:
        """Its memory is new."""
        with self._lock:
            self._uses[_memory(tensor)] = []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


HOST = Host()
