"""The board: counters that every rank writes and the supervisor reads, in shared memory.

It stays readable when a rank is stopped or dead, and writing costs no message. One writer per field:

    state, load, totals, histograms      (leader)        for Prometheus, among others
    rank 0: pid, started, finished, ...  (rank 0)
    rank 1: ...                          (rank 1)

A rank adds to its three `traced` fields after a step whose plan is `traced`; the leader reads all rows when a traced
attempt ends. A step that nobody traces costs a look at a flag. An observation in a histogram is two additions; whoever
reads between the two is wrong by one observation for a moment.
"""

import ctypes
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from services.executor.core.progress import DeviceMarks, DeviceProgress, ProgressCounter
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.flight_recorder import RankRecorder
from services.executor.ipc.table import map_tables, numbers_of, table
from shared.messages import GroupLoad, RankBeat
from shared.service.endpoints import cumulative
from shared.service.logs import LevelChange

T = TypeVar("T")


class RingState(IntEnum):
    STARTING = 0
    READY = 1
    DRAINING = 2


class BoardKind(IntEnum):
    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    STEP = 3
    BATCH = 4


_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DECODES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_STEPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
BOUNDS: tuple[tuple[float, ...], ...] = (_WAITS, _WAITS, _DECODES, _STEPS, _SIZES)  # by `BoardKind`
# Their names and what Prometheus is told of them.
HISTOGRAMS = {
    BoardKind.QUEUE: ("queue_seconds", "Time from acceptance by the group to admission to the batch."),
    BoardKind.PREFILL: ("prefill_seconds", "Time from admission to the batch to the first token."),
    BoardKind.DECODE: ("decode_seconds", "Time from the first token to the last, where there are several."),
    BoardKind.STEP: ("step_duration_seconds", "Time that a step takes."),
    BoardKind.BATCH: ("batch_size", "Sequences of a step."),
}


@table
class _Histogram(ctypes.Structure):
    sum: float
    # Up to each bound from the one before it, and beyond the last.
    counts: Annotated[Any, ctypes.c_int64 * (len(_WAITS) + 1)]


class _Load(ctypes.Structure):
    _fields_ = numbers_of(GroupLoad)


@table
class Totals(ctypes.Structure):
    """What a ring has done since it started: each field is a counter of Prometheus, with its help."""

    steps: Annotated[int, "Steps computed."]
    step_seconds: Annotated[float, "Time spent computing steps."]
    communication_seconds: Annotated[
        float, "Part of step_seconds that the leader spent in collectives, waiting for other ranks included."
    ]
    prompt_tokens: Annotated[int, "Prompt tokens computed."]
    output_tokens: Annotated[int, "Tokens generated."]
    prefix_queried_tokens: Annotated[int, "Prompt tokens looked up in the KV cache."]
    cached_tokens: Annotated[int, "Prompt tokens found in the KV cache."]
    preemptions: Annotated[int, "Preemptions: sequences that lost their KV blocks to others."]
    drafted_tokens: Annotated[int, "Draft tokens that were verified."]
    accepted_tokens: Annotated[int, "Draft tokens that were accepted."]
    draft_model_drafted_tokens: Annotated[int, "Part of drafted_tokens that the draft model has proposed."]
    draft_model_accepted_tokens: Annotated[int, "Part of accepted_tokens that the draft model has proposed."]
    draft_model_passes: Annotated[int, "Passes of the draft model that proposed tokens."]
    draft_model_seconds: Annotated[float, "Part of step_seconds that these passes took."]
    kv_blocks_recovered: Annotated[int, "Spilled KV blocks that were on disk when the ring started."]
    adapter_loads: Annotated[int, "LoRA adapters read into the memory of the ranks."]
    adapter_evictions: Annotated[int, "LoRA adapters evicted from the memory of the ranks."]

    def as_dict(self) -> dict[str, int | float]:
        return {name: getattr(self, name) for name, *_ in self._fields_}


# What Prometheus is told of each.
TOTALS: dict[str, str] = {name: kind.__metadata__[0] for name, kind in Totals.__annotations__.items()}


@table
class _Header(ctypes.Structure):
    state: int
    loop_beats: int
    disconnected: int  # whether the leader has no connection to NATS
    log_level: int
    log_until: int
    load: Annotated[Any, _Load]
    totals: Annotated[Totals, Totals]
    histograms: Annotated[Any, _Histogram * len(BoardKind)]


@table
class _Rank(ctypes.Structure):
    pid: int
    started: int
    finished: int
    progress: Annotated[Any, ctypes.c_int64 * 1]  # an array, since others hold its address
    loaded: int
    to_load: int
    traced_steps: int
    traced_ns: int
    communicating_ns: int
    gpu: Annotated[Any, ctypes.c_uint8 * 16]  # UUID of its GPU; zeros: it has none
    packs: int  # whether what it loads is packed for the kernels, for want of what an earlier start has kept


_RankWords = ctypes.c_int64 * (ctypes.sizeof(_Rank) // 8)


class RankTime(NamedTuple):
    """Over the traced steps so far. Times in nanoseconds."""

    steps: int = 0
    spent: int = 0
    # Waiting for the other ranks counts. On GPUs an estimate: one operation in some is timed.
    communicating: int = 0

    def since(self, before: "RankTime") -> "RankTime":
        return RankTime(*(now - then for now, then in zip(self, before, strict=True)))


class Loading(NamedTuple):
    """What a rank has read of its weights, in bytes."""

    rank: int
    pid: int
    done: int
    total: int  # 0: it has not begun


class Histogram(NamedTuple):
    buckets: list[tuple[str, float]]
    sum: float


class RankBoard:
    """One rank's row, for that rank to write."""

    def __init__(self, row: _Rank, recorder: RankRecorder) -> None:
        self._row = row
        self.recorder = recorder
        # Counts the layers computed; on a GPU, the marks that it has passed.
        self.progress: ProgressCounter = ProgressCounter(row.progress)
        self._device: DeviceProgress | None = None
        # Seconds that the collectives have taken so far; a stub has none.
        self.communicated: Callable[[], float] = float
        row.pid = os.getpid()

    def begin(self, step: int) -> None:
        self._row.started = step
        self.recorder.begin_step(step)

    def end(self, step: int) -> None:
        """It is over: its results are known, or it has failed."""
        self.recorder.end_step(step)
        self._row.finished = step

    def launched(self, step: int) -> None:
        """This rank has done its part of a step whose results another one reads. On a GPU that was to launch it, and it
        is over once the device has done it."""
        if self._device is None:
            self.end(step)
        else:
            self.recorder.end_step(step)
            self._device.end(step)

    def follow_device(self, marks: DeviceMarks) -> DeviceProgress:
        """From now on progress is what the device has done. Somebody must look (`DeviceProgress.start`)."""

        def finished(step: int) -> None:
            self._row.finished = step

        self.progress = self._device = DeviceProgress(self._row.progress, marks, finished)
        return self._device

    def computes_on(self, gpu: bytes) -> None:
        """Its GPU's UUID, 16 bytes."""
        self._row.gpu[:] = gpu

    def loaded(self, done: int, total: int) -> None:
        """Bytes of weights read, of how many."""
        self._row.to_load = total
        self._row.loaded = done

    def packs(self) -> None:
        """What follows of its load is packing."""
        self._row.packs = 1

    def run(self, plan: StepPlan, step: Callable[[], T]) -> T:
        """What `step` returns; its time is counted where `plan` is traced."""
        if not plan.traced:
            return step()
        before = self.communicated()
        began = time.perf_counter_ns()
        try:
            return step()
        finally:
            self._row.traced_ns += time.perf_counter_ns() - began
            self._row.communicating_ns += round((self.communicated() - before) * 1e9)
            self._row.traced_steps += 1


class RingBoard:
    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        self._header, self._rows = map_tables(path, _Header, _Rank * ranks, create=create)
        self.totals: Totals = self._header.totals
        self._load: _Load = self._header.load
        self._histograms: list[_Histogram] = list(self._header.histograms)
        self._recorder: RankRecorder | None = None

    def record(self, recorder: RankRecorder) -> None:
        """Has this process's rank write down its steps there too."""
        self._recorder = recorder

    def begun(self, rank: int) -> int:
        return int(self._rows[rank].started)

    # --- written by the leader -------------------------------------------------------------------

    def set_state(self, state: RingState) -> None:
        self._header.state = state

    def set_load(self, load: GroupLoad) -> None:
        for name, _ in _Load._fields_:
            setattr(self._load, name, getattr(load, name))

    def loop_beat(self, *, connected: bool) -> None:
        """The leader's event loop turns. `connected`: to NATS."""
        self._header.loop_beats += 1
        self._header.disconnected = not connected

    def add_step(self, nanoseconds: int, prompt_tokens: int, output_tokens: int, sequences: int = 0) -> None:
        seconds, totals = nanoseconds / 1e9, self.totals
        self.observe(BoardKind.STEP, seconds)
        self.observe(BoardKind.BATCH, sequences)
        totals.steps += 1
        totals.step_seconds += seconds
        totals.prompt_tokens += prompt_tokens
        totals.output_tokens += output_tokens

    def observe(self, kind: BoardKind, value: float) -> None:
        """`value`: seconds, or sequences."""
        histogram = self._histograms[kind]
        histogram.counts[bisect_left(BOUNDS[kind], value)] += 1
        histogram.sum += value

    def count_queried(self, tokens: int) -> None:
        """So many tokens of a prompt were looked up in the KV cache."""
        self.totals.prefix_queried_tokens += tokens

    def rank(self, rank: int) -> RankBoard:
        return RankBoard(self._rows[rank], self._recorder or RankRecorder.unread())

    # --- of ranks on other hosts: their row is copied ------------------------------------------------

    def row(self, rank: int) -> list[int]:
        return list(_RankWords.from_buffer(self._rows[rank]))

    def put_row(self, rank: int, row: Sequence[int]) -> None:
        """What `rank` has written on its host; of another length, it is no row and is left."""
        if len(row) == len(_RankWords()):
            _RankWords.from_buffer(self._rows[rank])[:] = list(row)

    # --- written by the supervisor ---------------------------------------------------------------

    def set_log_level(self, change: LevelChange) -> None:
        self._header.log_until = round(change.until)
        self._header.log_level = change.number

    def log_level(self) -> LevelChange:
        return LevelChange(self._header.log_level, float(self._header.log_until))

    # --- read by the supervisor ------------------------------------------------------------------

    @property
    def state(self) -> RingState:
        return RingState(self._header.state)

    @property
    def load(self) -> GroupLoad:
        return GroupLoad(*(getattr(self._load, name) for name, _ in _Load._fields_))

    @property
    def loop_beats(self) -> int:
        return int(self._header.loop_beats)

    @property
    def connected(self) -> bool:
        """Whether the leader's connection to NATS stands, as far as the leader knows."""
        return not self._header.disconnected

    @property
    def loaded(self) -> float:
        """Share of all ranks' weights that has been read, 0 to 1."""
        done, total = (sum(getattr(row, name) for row in self._rows) for name in ("loaded", "to_load"))
        return done / total if total else 0.0

    @property
    def packs(self) -> bool:
        """Whether a rank packs what it loads."""
        return any(row.packs for row in self._rows)

    def loading(self) -> list[Loading]:
        """Of every rank that has started."""
        rows = enumerate(self._rows)
        return [Loading(rank, row.pid, row.loaded, row.to_load) for rank, row in rows if row.pid]

    def beats(self) -> list[RankBeat]:
        """Progress of every rank that has started. Work is in flight for a rank from the moment the
        leader has begun the step, whether the rank has seen the plan or not."""
        begun = self._rows[0].started
        found = []
        for rank, row in enumerate(self._rows):
            if row.pid:
                finished = row.finished
                found.append(RankBeat(rank, row.pid, finished, row.progress[0], in_flight=begun > finished))
        return found

    def times(self) -> list[RankTime]:
        return [RankTime(row.traced_steps, row.traced_ns, row.communicating_ns) for row in self._rows]

    def histogram(self, kind: BoardKind) -> Histogram:
        histogram = self._histograms[kind]
        return Histogram(cumulative(BOUNDS[kind], list(histogram.counts)), histogram.sum)

    @property
    def gpus(self) -> dict[int, bytes]:
        """UUIDs by rank, of those that compute on a GPU."""
        return {rank: bytes(row.gpu) for rank, row in enumerate(self._rows) if any(row.gpu)}
