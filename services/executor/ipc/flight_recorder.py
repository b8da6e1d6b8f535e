"""The flight recorder: what each rank has done last, in memory that survives it.

As with the board, one process writes and another reads, and writing costs a few stores: the supervisor reads it
of ranks that are busy, stopped, stuck in native code or dead.

    row of a rank   | the collective under way | counters | steps: the last STEPS | log: the last LINES |
    behind them     | plans: the leader's last PLANS step plans |

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. Of the leader's plans sizes and block ids
are kept, never tokens; what does not fit into a slot is left out, and the sizes say how much there was.
"""

import ctypes
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from services.executor.ipc.table import map_tables, table
from shared.messages.debugging import PlanDump, PlanSequenceDump

if TYPE_CHECKING:
    from services.executor.core.step_plan import StepPlan

STEPS = 64  # steps that are kept of each rank
LINES = 40  # lines of its log that are kept of each rank
LINE_BYTES = 480
PLANS = 32  # plans that are kept
_SEQUENCES = 128
_BLOCKS = 1024
_NAME_BYTES = 2976


class CollectiveKind(IntEnum):
    """Of a collective, as `native/shared_memory.h` numbers them."""

    NONE = 0
    ALL_REDUCE = 1
    GATHER = 2
    BARRIER = 3


@table
class Collective(ctypes.Structure):
    """What a rank has to do with collectives. Native code writes these words too, in this order."""

    begun: int  # how many it has entered, since it started; the last one's number
    finished: int
    kind: int
    bytes: int  # of this rank's contribution
    since: int  # when it entered the last one
    busy_ns: int
    waited_ns: int  # of `busy_ns`; 0 where the collectives do not tell
    spare: int

    @property
    def in_flight(self) -> bool:
        return self.begun > self.finished

    @property
    def name(self) -> str:
        return next((kind.name.lower() for kind in CollectiveKind if kind == self.kind), "none")


@table
class StepTimes(ctypes.Structure):
    """One step of one rank. A time that has not come yet is 0."""

    step: int
    began: int
    sent: int  # when the leader had sent the plan to all others
    computed: int  # when the leader had the logits
    ended: int
    busy_ns: int  # in collectives
    waited_ns: int  # of that, for other ranks

    @property
    def stages(self) -> tuple[int, int, int]:
        """Nanoseconds until the plan was sent, then until the logits were there, then until the tokens were; 0 for what
        is not known (yet)."""
        sent = self.sent or self.began
        compute = max(0, self.computed - sent) if self.computed else 0
        sample = max(0, self.ended - self.computed) if self.computed and self.ended else 0
        return sent - self.began, compute, sample


@table
class _Line(ctypes.Structure):
    length: int
    text: Annotated[Any, ctypes.c_uint8 * LINE_BYTES]


@table
class RankRecord(ctypes.Structure):
    """One rank's row. It may change while it is read: what is read is what was last written."""

    words: Annotated[Collective, Collective]
    steps_begun: int
    lines_written: int
    excused_until: int
    slow_steps: int
    times: Annotated[Any, StepTimes * STEPS]
    log: Annotated[Any, _Line * LINES]

    @property
    def collective(self) -> Collective:
        return Collective.from_buffer_copy(self.words)

    def steps(self, most: int = STEPS) -> list[StepTimes]:
        """The last `most` steps, the oldest first; the last one may be under way."""
        last = range(max(0, self.steps_begun - min(most, STEPS)), self.steps_begun)
        return [StepTimes.from_buffer_copy(self.times[number % STEPS]) for number in last]

    def step(self, step: int) -> StepTimes | None:
        return next((times for times in reversed(self.steps()) if times.step == step), None)

    def lines(self) -> list[str]:
        """The last lines of its log, the oldest first."""
        last = range(max(0, self.lines_written - LINES), self.lines_written)
        kept = [self.log[number % LINES] for number in last]
        return [bytes(line.text[: line.length]).decode(errors="replace") for line in kept]


class RankRecorder:
    """One rank's row, for that rank to write. One thread at a time writes steps, another may write lines."""

    def __init__(self, row: RankRecord) -> None:
        self._row = row
        self.collective = row.words  # for whoever runs the collectives
        self._times: list[StepTimes] = list(row.times)
        self._at = self._over = self._times[0]
        self._busy = self._waited = 0

    @classmethod
    def unread(cls) -> "RankRecorder":
        """For ranks that nobody looks into."""
        return cls(RankRecord())

    # --- steps -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        row, collective = self._row, self.collective
        self._busy, self._waited = collective.busy_ns, collective.waited_ns
        self._at = at = self._times[row.steps_begun % STEPS]
        at.step, at.began = step, time.monotonic_ns()
        at.sent = at.computed = at.ended = at.busy_ns = at.waited_ns = 0
        row.steps_begun += 1

    def sent(self) -> None:
        """Every other rank has been sent the step's plan."""
        self._at.sent = time.monotonic_ns()

    def computed(self) -> None:
        self._at.computed = time.monotonic_ns()

    def end_step(self, step: int) -> None:
        """`step` is one of the last two that were begun."""
        at, collective = self._at, self.collective
        if at.step != step:  # the next one was launched before it was over
            at = self._times[(self._row.steps_begun - 2) % STEPS]
        self._over = at
        at.busy_ns = collective.busy_ns - self._busy
        at.waited_ns = collective.waited_ns - self._waited
        at.ended = time.monotonic_ns()

    @property
    def last_end(self) -> float:
        """When the last step was over; seconds, monotonic."""
        return self._over.ended / 1e9

    # --- collectives that are called from Python -------------------------------------------------

    def enter(self, kind: CollectiveKind, size: int) -> None:
        """A collective begins that this rank gives `size` bytes to."""
        collective = self.collective
        collective.kind, collective.bytes = kind, size
        collective.since = time.monotonic_ns()
        collective.begun += 1

    def leave(self) -> None:
        collective = self.collective
        collective.busy_ns += time.monotonic_ns() - collective.since
        collective.finished = collective.begun

    # --- rarely ----------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        data = text.encode(errors="replace")[:LINE_BYTES]
        line = self._row.log[self._row.lines_written % LINES]
        ctypes.memmove(line.text, data, len(data))
        line.length = len(data)
        self._row.lines_written += 1

    def excuse(self, seconds: float) -> None:
        """For so long this rank is not to be taken for hung: it writes a profile. 0: from now on it is."""
        self._row.excused_until = time.monotonic_ns() + int(seconds * 1e9)

    def count_slow_step(self) -> None:
        self._row.slow_steps += 1


@table
class _Plan(ctypes.Structure):
    step: int  # 0 while the slot is being written
    made: int
    took_ns: int  # 0 while the step is under way
    tokens: int
    decodes: int
    sampled: int
    saves: int
    compressions: int
    restores: int
    pools: int
    snapshots: int
    snapshot_saves: int
    snapshot_loads: int
    sequence_count: int
    block_size: int
    blocks: int  # in all block tables
    name_bytes: int
    query_lens: Annotated[Any, ctypes.c_int32 * _SEQUENCES]
    context_lens: Annotated[Any, ctypes.c_int32 * _SEQUENCES]
    block_table: Annotated[Any, ctypes.c_int32 * _BLOCKS]
    names: Annotated[Any, ctypes.c_uint8 * _NAME_BYTES]


_SIZES = [name for name in _Plan.__annotations__ if name in PlanDump.__struct_fields__ and name != "step"]


class PlanLog:
    """The slots; the leader writes, others read."""

    def __init__(self, slots: Any) -> None:
        self._slots: list[_Plan] = list(slots)
        self._made = 0

    def add(self, plan: "StepPlan", generation_ids: Sequence[str], block_size: int, state_blocks: int = 0) -> None:
        """`generation_ids`: of the plan's sequences, in its order; `state_blocks`: that a snapshot takes."""
        slot = self._slots[self._made % PLANS]
        self._made += 1
        slot.step = 0  # whoever reads the slot now is told so
        names = "\n".join(generation_ids).encode(errors="replace")
        slot.made, slot.took_ns = time.monotonic_ns(), 0
        slot.tokens, slot.decodes = len(plan.token_ids) // 4, plan.num_decodes
        slot.sampled, slot.saves = len(plan.sample_rows) // 4, len(plan.saves) // 8
        slot.compressions, slot.restores = len(plan.compressions) // 8, len(plan.restores) // 8
        slot.pools, slot.block_size = len(plan.pools) // 8, block_size
        slot.snapshots = len(plan.state_snapshots) // 8
        slot.snapshot_saves = len(plan.state_saves) // 4 // (1 + state_blocks)
        slot.snapshot_loads = len(plan.state_loads) // 4 // (1 + state_blocks)
        slot.sequence_count, slot.blocks = len(plan.query_lens) // 4, len(plan.block_tables) // 4
        slot.name_bytes = min(len(names), _NAME_BYTES)
        ctypes.memmove(slot.query_lens, plan.query_lens, min(len(plan.query_lens), 4 * _SEQUENCES))
        ctypes.memmove(slot.context_lens, plan.context_lens, min(len(plan.context_lens), 4 * _SEQUENCES))
        ctypes.memmove(slot.block_table, plan.block_tables, min(len(plan.block_tables), 4 * _BLOCKS))
        ctypes.memmove(slot.names, names, slot.name_bytes)
        slot.step = plan.step

    def took(self, step: int, seconds: float) -> None:
        """`step`, of one of the last two plans, is over."""
        slot = self._slots[(self._made - 1) % PLANS]
        if slot.step != step:  # the next one was planned ahead
            slot = self._slots[(self._made - 2) % PLANS]
        slot.took_ns = int(seconds * 1e9)

    def read(self) -> list[PlanDump]:
        """The plans that are kept, by step."""
        now = time.monotonic_ns()
        copies = [(slot, _Plan.from_buffer_copy(slot)) for slot in self._slots]
        # Overwritten while it was copied: it is another step's by now, or none's.
        kept = [plan for slot, plan in copies if plan.step and slot.step == plan.step]
        return [_dumped(plan, now) for plan in sorted(kept, key=lambda plan: plan.step)]


def _dumped(plan: _Plan, now: int) -> PlanDump:
    ids = bytes(plan.names[: plan.name_bytes]).decode(errors="replace").split("\n") if plan.name_bytes else []
    sequences, at = [], 0
    table = plan.block_table[: min(plan.blocks, _BLOCKS)]
    for number in range(min(plan.sequence_count, _SEQUENCES)):
        context = plan.context_lens[number]
        end = at + -(-context // max(1, plan.block_size))
        name = ids[number] if number < len(ids) else ""
        sequences.append(PlanSequenceDump(name, plan.query_lens[number], context, table[at:end]))
        at = end
    return PlanDump(
        step=plan.step,
        age=round((now - plan.made) / 1e9, 4),
        ms=round(plan.took_ns / 1e6, 3),
        **{name: getattr(plan, name) for name in _SIZES},
        sequences=sequences,
    )


class FlightRecorder:
    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        """Without the file (a rank that no supervisor has started) nobody reads what is written."""
        there = path if create or path.exists() else None
        self._rows, plans = map_tables(there, RankRecord * ranks, _Plan * PLANS, create=create)
        self.plans = PlanLog(plans)

    @classmethod
    def beside(cls, board: Path, ranks: int, *, create: bool = False) -> "FlightRecorder":
        """The recorder of the ring that has its board there."""
        return cls(board.with_name("recorder"), ranks, create=create)

    def rank(self, rank: int) -> RankRecorder:
        return RankRecorder(self._rows[rank])

    def read(self, rank: int) -> RankRecord:
        row: RankRecord = self._rows[rank]
        return row

    def read_all(self) -> list[RankRecord]:
        return list(self._rows)
