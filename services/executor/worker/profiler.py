"""torch's profiler over the next steps of one rank, while it serves.

    listening thread   begin ─ waits for the end, gives up after `timeout`
    engine's thread       └─▶ before_step: start ─ step ─ step ─ ... ─ before_step or idle: stop
    a thread of its own                                                     └─▶ writes trace and table

Starting and stopping belong to the thread that computes, since torch watches operations by thread. They take a
moment in which no step is computed, so the rank is excused for it: nobody takes it for hung.

The ranges of a profile become a table of operators:

    thread   |---- compute ----------------|     total of compute: the whole; self: without what is inside
               |-- mm --|   |- softmax -|

torch's own table takes many times as long to make, while the rank serves.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog
from torch._C._autograd import DeviceType
from torch.profiler import profile, record_function

from services.executor.core import spans
from services.executor.ipc.flight_recorder import RankRecorder
from services.executor.ipc.rank_pipe import ProfileQuestion, write_answer
from shared.messages.debugging import OperatorTime, ProfileSummary


class Range(NamedTuple):
    """Something that took its time, nanoseconds; or an allocation, which takes none."""

    name: str
    start: int
    end: int
    thread: int
    on_device: bool = False
    allocated: int = 0  # bytes; below 0: freed


@dataclass(slots=True)
class _Row:
    calls: int = 0
    own: int = 0
    total: int = 0
    device: int = 0
    allocated: int = 0


def operator_table(ranges: Iterable[Range], most: int) -> list[OperatorTime]:
    """The `most` operators with the most time by themselves; on a device where there is one.

    Ranges of a thread lie within each other or apart; those on a device are all counted as they are.
    """
    rows: defaultdict[str, _Row] = defaultdict(_Row)
    open_: defaultdict[int, list[Range]] = defaultdict(list)
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        took, stack = one.end - one.start, open_[one.thread]
        while stack and stack[-1].end <= one.start:
            stack.pop()
        if one.allocated:
            if stack:
                rows[stack[-1].name].allocated += one.allocated
            continue
        row = rows[one.name]
        row.calls += 1
        if one.on_device:
            row.device += took
            continue
        row.own += took
        if stack:
            rows[stack[-1].name].own -= took
        if all(outer.name != one.name for outer in stack):  # one within itself counts once
            row.total += took
        stack.append(one)
    found = [
        OperatorTime(name, row.calls, row.own / 1e3, row.total / 1e3, row.device / 1e3, row.allocated)
        for name, row in rows.items()
    ]
    found.sort(key=lambda row: (-row.device_us, -row.self_us, row.name))
    return found[:most]


log = structlog.get_logger(__name__)

EXCUSE = 60.0  # seconds that starting, or stopping and writing, may take
IDLE_END = 3.0  # seconds without a step that end a profile which has some: what was asked about is over
MOST_STEPS = 500  # however long it is to last: what is recorded of a step may be thousands of operations
ALLOCATION = "[memory]"  # torch's name for the event
OPERATORS = 40  # rows of the table that are kept


class Profiler:
    def __init__(self, rank: int, recorder: RankRecorder, question: ProfileQuestion) -> None:
        self._rank = rank
        self._recorder = recorder
        self._question = question
        self._lock = threading.Lock()
        self._profile: profile | None = None
        self._over = False
        self._steps = 0
        self._began = self._last = self._ended = 0.0
        self._native: dict[str, float] = {}
        self._give_up_at = time.monotonic() + question.timeout

    def begin(self) -> None:
        """From the next step on. Returns at once."""
        spans.watch(self)
        timer = threading.Timer(self._question.timeout, self._give_up)
        timer.daemon = True
        timer.start()

    # --- in the engine's thread ------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        if self._profile is None:
            if step >= self._question.from_step:
                self._start()
        elif self._is_complete():
            self._stop()
            return
        if self._profile is not None:
            self._steps += 1
            self._last = time.monotonic()

    def idle(self) -> None:
        if self._profile is None:
            return
        if self._is_complete() or time.monotonic() - self._last > IDLE_END:
            self._stop()

    def _is_complete(self) -> bool:
        question, now = self._question, time.monotonic()
        enough = self._steps >= (question.steps or MOST_STEPS)
        late = question.seconds > 0 and now - self._began >= question.seconds
        return enough or late or now >= self._give_up_at

    def _start(self) -> None:
        with self._lock:
            if self._over:
                return
            self._recorder.excuse(EXCUSE)
            started = profile(profile_memory=self._question.memory)
            started.start()
            self._profile = started
        self._native = dict(spans.native_spent()) if spans.native_spent is not None else {}
        spans.name_ranges(record_function)
        self._recorder.excuse(0)
        self._began = time.monotonic()

    def _stop(self) -> None:
        with self._lock:
            if self._over or self._profile is None:
                return
            self._over = True
        spans.name_ranges(None)
        spans.watch(None)
        self._recorder.excuse(EXCUSE)
        if spans.native_spent is not None:
            spent = spans.native_spent()
            self._native = {part: spent[part] - before for part, before in self._native.items()}
        self._ended = self._recorder.last_end
        self._profile.stop()
        threading.Thread(target=self._write, name="profile", daemon=True).start()

    # --- in other threads ------------------------------------------------------------------------

    def _give_up(self) -> None:
        """The time is over. What has begun ends by itself, at the next look of the engine's thread."""
        with self._lock:
            if self._over or self._profile is not None:
                return
            self._over = True
        spans.watch(None)
        error = f"no step was computed within {self._question.timeout:g} s"
        self._answer(ProfileSummary(self._rank, error=error))

    def _write(self) -> None:
        question = self._question
        assert self._profile is not None
        try:
            trace = Path(question.path).with_name(question.trace)
            self._profile.export_chrome_trace(str(trace))
            found = ProfileSummary(
                rank=self._rank,
                steps=self._steps,
                seconds=max(0.0, self._ended - self._began),
                trace=question.trace,
                operators=operator_table(_ranges(self._profile), OPERATORS),
                native={part: seconds for part, seconds in self._native.items() if seconds > 0},
            )
        except Exception as error:
            log.exception("profile_failed")
            found = ProfileSummary(self._rank, error=f"the profile cannot be written ({error})")
        self._recorder.excuse(0)
        self._answer(found)

    def _answer(self, summary: ProfileSummary) -> None:
        write_answer(Path(self._question.path), summary)


def _ranges(ended: profile) -> Iterator[Range]:
    """Of operators on a CPU, of what ran on a device, and of memory on the host."""
    assert ended.profiler is not None
    results = ended.profiler.kineto_results
    assert results is not None
    for event in results.events():
        name, start, end = event.name(), event.start_ns(), event.end_ns()
        on_device = event.device_type() != DeviceType.CPU
        if name == ALLOCATION and not on_device:
            allocated = event.nbytes()  # type: ignore[attr-defined]  # torch's stubs leave it out
            yield Range(name, start, start, event.start_thread_id(), allocated=allocated)
        elif end > start and not (on_device and event.is_user_annotation()):
            yield Range(name, start, end, event.start_thread_id(), on_device)
