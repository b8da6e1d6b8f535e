"""The board: counters that every rank writes and the orchestrator reads, in shared memory.

It stays readable when a rank is stopped or dead, and writing costs no message. One writer per
field, each field an aligned 64-bit integer, so that no lock is needed:

    | header: state, load, totals          (leader) |
    | rank 0: pid, started, finished, ...  (rank 0) |
    | rank 1: ...                          (rank 1) |
    | figures: histograms, GPUs (leader, each rank) |   `board_metrics.py`

Of steps that somebody traces a rank's row counts three words more:

    | steps | nanoseconds | of these communicating |

A rank adds to them after a step whose plan is `traced`; the leader reads all rows when a traced attempt ends. A step
that nobody traces costs a look at a flag.
"""

import mmap
import os
import time
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from services.executor.core.progress import DeviceProgress, Marks, Progress
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board_metrics import GpuRow, Kind, RingFigures, words_of
from services.executor.ipc.flight_recorder import RankRecorder
from shared.messages import GroupLoad, RankBeat
from shared.service.logs import Change

T = TypeVar("T")
WORDS = 3
_STEPS, _SPENT, _COMMUNICATING = range(WORDS)


class Communicating(Protocol):
    """The collectives, for what they say of their time."""

    @property
    def busy_seconds(self) -> float: ...


class RankTime(NamedTuple):
    """Over the traced steps so far. Times in nanoseconds."""

    steps: int = 0
    spent: int = 0
    communicating: int = 0
    """Waiting for the other ranks counts. On GPUs an estimate: one operation in some is timed."""

    def since(self, before: "RankTime") -> "RankTime":
        """What has come since `before`."""
        return RankTime(*(now - then for now, then in zip(self, before, strict=True)))


class RankClock:
    """One rank's words, for that rank to write."""

    def __init__(self, words: memoryview, offset: int) -> None:
        self._words = words
        self._offset = offset
        self.collectives: Communicating | None = None
        """None: the rank has none, as a stub."""

    def run(self, plan: StepPlan, step: Callable[[], T]) -> T:
        """What `step` returns; its time is counted where `plan` is traced."""
        if not plan.traced:
            return step()
        before = self._communicated()
        began = time.perf_counter_ns()
        try:
            return step()
        finally:
            words, offset = self._words, self._offset
            words[offset + _SPENT] += time.perf_counter_ns() - began
            words[offset + _COMMUNICATING] += round((self._communicated() - before) * 1e9)
            words[offset + _STEPS] += 1

    def _communicated(self) -> float:
        return 0.0 if self.collectives is None else self.collectives.busy_seconds


_WORD = 8


class RingState(IntEnum):
    STARTING = 0
    READY = 1
    DRAINING = 2


class _Header(IntEnum):
    STATE = 0
    RUNNING = 1
    WAITING = 2
    WAITING_TOKENS = 3
    FREE_BLOCKS = 4
    TOTAL_BLOCKS = 5
    LOOP_BEAT = 6
    STEPS = 7
    STEP_NS = 8
    PROMPT_TOKENS = 9
    OUTPUT_TOKENS = 10
    CACHED_TOKENS = 11
    PREEMPTIONS = 12
    VERSION = 13
    DRAFTED_TOKENS = 14
    ACCEPTED_TOKENS = 15
    SLOTS = 16
    PLAIN_STEP_NS = 17
    PROMPT_RATE = 18
    LOG_LEVEL = 19
    LOG_UNTIL = 20
    SIZE = 21


class _Rank(IntEnum):
    PID = 0
    STARTED = 1
    FINISHED = 2
    PROGRESS = 3
    LOADED = 4
    TO_LOAD = 5
    TRACED = 8
    """And the words behind it: a `RankClock`'s."""
    SIZE = 16


class Totals(msgspec.Struct, frozen=True):
    """What a ring has done since it started."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Loading(NamedTuple):
    """What a rank has read of its weights, in bytes."""

    rank: int
    pid: int
    done: int
    total: int
    """0: it has not begun."""


class RankBoard:
    """One rank's row, for that rank to write."""

    def __init__(self, words: memoryview, offset: int, recorder: RankRecorder, gpu: GpuRow) -> None:
        self._words = words
        self.gpu = gpu
        """Says which GPU the rank computes on."""
        self._offset = offset
        self.recorder = recorder
        self.progress: Progress = Progress(words, offset + _Rank.PROGRESS)
        """Counts the layers computed; on a GPU, the marks that it has passed."""
        self._device: DeviceProgress | None = None
        self.clock = RankClock(words, offset + _Rank.TRACED)
        words[offset + _Rank.PID] = os.getpid()

    def begin(self, step: int) -> None:
        self._words[self._offset + _Rank.STARTED] = step
        self.recorder.begin_step(step)

    def end(self, step: int) -> None:
        """It is over: its results are known, or it has failed."""
        self.recorder.end_step(step)
        self._finished(step)

    def launched(self, step: int) -> None:
        """This rank has done its part of a step whose results another one reads. On a GPU that was to launch it, and it
        is over once the device has done it."""
        if self._device is None:
            self.end(step)
        else:
            self.recorder.end_step(step)
            self._device.end(step)

    def follow_device(self, marks: Marks) -> DeviceProgress:
        """From now on progress is what the device has done. Somebody must look (`DeviceProgress.start`)."""
        index = self._offset + _Rank.PROGRESS
        self.progress = self._device = DeviceProgress(self._words, index, marks, self._finished)
        return self._device

    def _finished(self, step: int) -> None:
        self._words[self._offset + _Rank.FINISHED] = step

    def loaded(self, done: int, total: int) -> None:
        """Bytes of weights read, of how many."""
        self._words[self._offset + _Rank.TO_LOAD] = total
        self._words[self._offset + _Rank.LOADED] = done


class RingBoard:
    """The whole board."""

    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        self._ranks = ranks
        figures = self._row(ranks)
        size = (figures + words_of(ranks)) * _WORD
        if create:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")
        self.figures = RingFigures(self._words, figures, ranks)
        """For Prometheus."""
        self._recorder: RankRecorder | None = None

    def record(self, recorder: RankRecorder) -> None:
        """Has this process's rank write down its steps there too."""
        self._recorder = recorder

    def begun(self, rank: int) -> int:
        """The last step that a rank has begun."""
        return self._words[self._row(rank) + _Rank.STARTED]

    def close(self) -> None:
        self._words.release()
        self._map.close()

    # --- written by the leader -------------------------------------------------------------------

    def set_state(self, state: RingState) -> None:
        self._words[_Header.STATE] = state

    def set_load(self, load: GroupLoad) -> None:
        words = self._words
        words[_Header.RUNNING] = load.running
        words[_Header.WAITING] = load.waiting
        words[_Header.WAITING_TOKENS] = load.waiting_tokens
        words[_Header.FREE_BLOCKS] = load.free_blocks
        words[_Header.TOTAL_BLOCKS] = load.total_blocks
        words[_Header.VERSION] = load.version
        words[_Header.SLOTS] = load.slots
        words[_Header.PLAIN_STEP_NS] = round(load.step_seconds * 1e9)
        words[_Header.PROMPT_RATE] = round(load.prompt_tokens_per_second)

    def loop_beat(self) -> None:
        """The leader's event loop turns."""
        self._words[_Header.LOOP_BEAT] += 1

    def add_step(self, nanoseconds: int, prompt_tokens: int, output_tokens: int, sequences: int = 0) -> None:
        """A step with so many sequences has been computed."""
        words = self._words
        self.figures.observe(Kind.STEP, nanoseconds / 1e9)
        self.figures.observe(Kind.BATCH, sequences)
        words[_Header.STEPS] += 1
        words[_Header.STEP_NS] += nanoseconds
        words[_Header.PROMPT_TOKENS] += prompt_tokens
        words[_Header.OUTPUT_TOKENS] += output_tokens

    def set_cache_totals(self, cached_tokens: int, preemptions: int) -> None:
        self._words[_Header.CACHED_TOKENS] = cached_tokens
        self._words[_Header.PREEMPTIONS] = preemptions

    def set_draft_totals(self, drafted: int, accepted: int) -> None:
        self._words[_Header.DRAFTED_TOKENS] = drafted
        self._words[_Header.ACCEPTED_TOKENS] = accepted

    def rank(self, rank: int) -> RankBoard:
        """The row of `rank`, for the process that is this rank."""
        recorder = self._recorder or RankRecorder.unread()
        return RankBoard(self._words, self._row(rank), recorder, self.figures.gpu(rank))

    # --- of ranks on other hosts: their row is copied ------------------------------------------------

    def row(self, rank: int) -> list[int]:
        """What `rank` has written."""
        return self._words[self._row(rank) : self._row(rank) + _Rank.SIZE].tolist()

    def put_row(self, rank: int, row: Sequence[int]) -> None:
        """What `rank` has written on its host; of another length, it is no row and is left."""
        if len(row) == _Rank.SIZE:
            self._words[self._row(rank) : self._row(rank) + _Rank.SIZE] = memoryview(array("q", row))

    # --- written by the orchestrator -------------------------------------------------------------

    def set_log_level(self, change: Change) -> None:
        """What the ranks log from now on."""
        self._words[_Header.LOG_UNTIL] = round(change.until)
        self._words[_Header.LOG_LEVEL] = change.number

    def log_level(self) -> Change:
        """Read by the ranks."""
        return Change(self._words[_Header.LOG_LEVEL], float(self._words[_Header.LOG_UNTIL]))

    # --- read by the orchestrator ----------------------------------------------------------------

    @property
    def state(self) -> RingState:
        return RingState(self._words[_Header.STATE])

    @property
    def load(self) -> GroupLoad:
        words = self._words
        return GroupLoad(
            running=words[_Header.RUNNING],
            waiting=words[_Header.WAITING],
            waiting_tokens=words[_Header.WAITING_TOKENS],
            free_blocks=words[_Header.FREE_BLOCKS],
            total_blocks=words[_Header.TOTAL_BLOCKS],
            version=words[_Header.VERSION],
            slots=words[_Header.SLOTS],
            step_seconds=words[_Header.PLAIN_STEP_NS] / 1e9,
            prompt_tokens_per_second=float(words[_Header.PROMPT_RATE]),
        )

    @property
    def loop_beats(self) -> int:
        return self._words[_Header.LOOP_BEAT]

    @property
    def totals(self) -> Totals:
        words = self._words
        return Totals(
            steps=words[_Header.STEPS],
            step_seconds=words[_Header.STEP_NS] / 1e9,
            prompt_tokens=words[_Header.PROMPT_TOKENS],
            output_tokens=words[_Header.OUTPUT_TOKENS],
            cached_tokens=words[_Header.CACHED_TOKENS],
            preemptions=words[_Header.PREEMPTIONS],
            drafted_tokens=words[_Header.DRAFTED_TOKENS],
            accepted_tokens=words[_Header.ACCEPTED_TOKENS],
        )

    @property
    def loaded(self) -> float:
        """Share of all ranks' weights that has been read, 0 to 1."""
        done = sum(self._words[self._row(rank) + _Rank.LOADED] for rank in range(self._ranks))
        total = sum(self._words[self._row(rank) + _Rank.TO_LOAD] for rank in range(self._ranks))
        return done / total if total else 0.0

    def loading(self) -> list[Loading]:
        """Of every rank that has started."""
        rows = [self.row(rank) for rank in range(self._ranks)]
        return [
            Loading(rank, row[_Rank.PID], row[_Rank.LOADED], row[_Rank.TO_LOAD])
            for rank, row in enumerate(rows)
            if row[_Rank.PID]
        ]

    def beats(self) -> list[RankBeat]:
        """Progress of every rank that has started. Work is in flight for a rank from the moment the
        leader has begun the step, whether the rank has seen the plan or not."""
        begun = self._words[self._row(0) + _Rank.STARTED]
        found = []
        for rank in range(self._ranks):
            row = self._words[self._row(rank) : self._row(rank) + _Rank.SIZE]
            if row[_Rank.PID]:
                finished = row[_Rank.FINISHED]
                found.append(
                    RankBeat(rank, row[_Rank.PID], finished, row[_Rank.PROGRESS], in_flight=begun > finished)
                )
        return found

    def times(self) -> list[RankTime]:
        """What each rank has spent on traced steps."""
        first = (self._row(rank) + _Rank.TRACED for rank in range(self._ranks))
        return [RankTime(*self._words[word : word + WORDS]) for word in first]

    @staticmethod
    def _row(rank: int) -> int:
        return _Header.SIZE + rank * _Rank.SIZE
