"""The flight recorder: what each rank has done last, in memory that survives it.

As with the board, one process writes and another reads, and writing costs a few stores: the orchestrator reads it
of ranks that are busy, stopped, stuck in native code or dead.

    row of a rank   | words: the collective under way, counters | steps: the last STEPS | log: the last lines |
    behind them     | plans: the leader's last PLANS step plans |

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.

Of the leader's plans sizes and block ids are kept, never tokens:

    slot   | step, times, sizes (words) | S, table blocks kept | query lens | context lens | block table | ids |

A plan is kept by copying parts of its arrays as they are; what does not fit into the slot is left out, and
the sizes say how much there was.
"""

import mmap
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from services.executor.core.step_plan import StepPlan


_WORD = 8
STEPS = 64
"""Steps that are kept of each rank."""
_STEP_WORDS = 8
LINES = 40
"""Lines of its log that are kept of each rank."""
LINE_BYTES = 480
_LINE_HEAD = 16


class Kind(IntEnum):
    """Of a collective, as `native/shared_memory.h` numbers them."""

    NONE = 0
    ALL_REDUCE = 1
    GATHER = 2
    BARRIER = 3


class _Word(IntEnum):
    """The first `COLLECTIVE_WORDS` are also written by native code, in this order."""

    BEGUN = 0
    FINISHED = 1
    KIND = 2
    BYTES = 3
    SINCE = 4
    BUSY_NS = 5
    WAITED_NS = 6
    SPARE = 7
    STEPS = 8
    LINES = 9
    EXCUSED_UNTIL = 10
    SLOW_STEPS = 11
    SIZE = 16


COLLECTIVE_WORDS = 8


class _Step(IntEnum):
    STEP = 0
    BEGAN = 1
    SENT = 2
    COMPUTED = 3
    ENDED = 4
    BUSY = 5
    WAITED = 6


# Plain numbers, for what happens in every step: an enumeration's members take longer to look up than to store.
_STEPS_BEGUN, _BUSY, _WAITED = int(_Word.STEPS), int(_Word.BUSY_NS), int(_Word.WAITED_NS)
_SENT, _COMPUTED, _ENDED = int(_Step.SENT), int(_Step.COMPUTED), int(_Step.ENDED)
_BEGIN, _END = struct.Struct("7q"), struct.Struct("3q")
"""A step's words; those from its end on."""
_STEPS_AT = int(_Word.SIZE)
_LINES_AT = (_STEPS_AT + STEPS * _STEP_WORDS) * _WORD
_ROW_BYTES = _LINES_AT + LINES * (_LINE_HEAD + LINE_BYTES)
_ROW_BYTES += -_ROW_BYTES % _WORD


class Collective(msgspec.Struct, frozen=True):
    """What a rank has to do with collectives."""

    begun: int
    """How many it has entered, since it started; the last one's number."""
    finished: int
    kind: Kind
    bytes: int
    """Of this rank's contribution."""
    since: int
    """When it entered the last one."""
    busy_ns: int
    waited_ns: int
    """Of `busy_ns`; 0 where the collectives do not tell."""

    @property
    def in_flight(self) -> bool:
        return self.begun > self.finished


class StepTimes(msgspec.Struct, frozen=True):
    """One step of one rank. A time that has not come yet is 0."""

    step: int
    began: int
    sent: int
    """When the leader had sent the plan to all others."""
    computed: int
    """When the leader had the logits."""
    ended: int
    busy_ns: int
    """In collectives."""
    waited_ns: int
    """Of that, for other ranks."""


class RankRecorder:
    """One rank's row, for that rank to write. One thread at a time writes steps, another may write lines."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._bytes = memory[offset : offset + _ROW_BYTES]
        self._words = self._bytes[:_LINES_AT].cast("q")
        self._at = self._over = _STEPS_AT
        self._busy = self._waited = 0

    @classmethod
    def unread(cls) -> "RankRecorder":
        """For ranks that nobody looks into."""
        return cls(memoryview(bytearray(_ROW_BYTES)), 0)

    @property
    def collective_words(self) -> memoryview:
        """`COLLECTIVE_WORDS` words (format `q`), for whoever runs the collectives."""
        return self._words[:COLLECTIVE_WORDS]

    # --- steps -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        words = self._words
        count = words[_STEPS_BEGUN]
        self._at = at = _STEPS_AT + count % STEPS * _STEP_WORDS
        self._busy, self._waited = words[_BUSY], words[_WAITED]
        _BEGIN.pack_into(self._bytes, at * _WORD, step, time.monotonic_ns(), 0, 0, 0, 0, 0)
        words[_STEPS_BEGUN] = count + 1

    def sent(self) -> None:
        """Every other rank has been sent the step's plan."""
        self._words[self._at + _SENT] = time.monotonic_ns()

    def computed(self) -> None:
        """The logits are there."""
        self._words[self._at + _COMPUTED] = time.monotonic_ns()

    def end_step(self, step: int) -> None:
        """`step` is one of the last two that were begun."""
        words, at = self._words, self._at
        if words[at] != step:  # the next one was launched before it was over
            at = _STEPS_AT + (words[_STEPS_BEGUN] - 2) % STEPS * _STEP_WORDS
        self._over, at = at, at + _ENDED
        busy, waited = words[_BUSY] - self._busy, words[_WAITED] - self._waited
        _END.pack_into(self._bytes, at * _WORD, time.monotonic_ns(), busy, waited)

    @property
    def last_end(self) -> float:
        """When the last step was over; seconds, monotonic."""
        return self._words[self._over + _ENDED] / 1e9

    # --- collectives that are called from Python -------------------------------------------------

    def enter(self, kind: Kind, size: int) -> None:
        """A collective begins that this rank gives `size` bytes to."""
        words = self._words
        words[_Word.KIND], words[_Word.BYTES] = kind, size
        words[_Word.SINCE] = time.monotonic_ns()
        words[_Word.BEGUN] += 1

    def leave(self) -> None:
        words = self._words
        words[_Word.BUSY_NS] += time.monotonic_ns() - words[_Word.SINCE]
        words[_Word.FINISHED] = words[_Word.BEGUN]

    # --- rarely ----------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Keeps a line of the log."""
        count = self._words[_Word.LINES]
        at = _LINES_AT + count % LINES * (_LINE_HEAD + LINE_BYTES)
        data = text.encode(errors="replace")[:LINE_BYTES]
        self._bytes[at : at + 8] = time.time_ns().to_bytes(8, "little")
        self._bytes[at + 8 : at + _LINE_HEAD] = len(data).to_bytes(8, "little")
        self._bytes[at + _LINE_HEAD : at + _LINE_HEAD + len(data)] = data
        self._words[_Word.LINES] = count + 1

    def excuse(self, seconds: float) -> None:
        """For so long this rank is not to be taken for hung: it writes a profile. 0: from now on it is."""
        self._words[_Word.EXCUSED_UNTIL] = time.monotonic_ns() + int(seconds * 1e9)

    def count_slow_step(self) -> None:
        self._words[_Word.SLOW_STEPS] += 1


class RankRecord:
    """The same row, for whoever reads it. It may change meanwhile: what is read is what was last written."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._bytes = memory[offset : offset + _ROW_BYTES]
        self._words = self._bytes[:_LINES_AT].cast("q")

    @property
    def collective(self) -> Collective:
        words = self._words
        kind = words[_Word.KIND]
        return Collective(
            words[_Word.BEGUN],
            words[_Word.FINISHED],
            Kind(kind) if kind in Kind._value2member_map_ else Kind.NONE,
            words[_Word.BYTES],
            words[_Word.SINCE],
            words[_Word.BUSY_NS],
            words[_Word.WAITED_NS],
        )

    @property
    def slow_steps(self) -> int:
        return self._words[_Word.SLOW_STEPS]

    @property
    def excused_until(self) -> int:
        return self._words[_Word.EXCUSED_UNTIL]

    def steps(self, most: int = STEPS) -> list[StepTimes]:
        """The last `most` steps, the oldest first; the last one may be under way."""
        count = self._words[_Word.STEPS]
        return [self._step(number) for number in range(max(0, count - min(most, STEPS)), count)]

    def step(self, step: int) -> StepTimes | None:
        """That step, where it is among the last ones."""
        count = self._words[_Word.STEPS]
        for number in range(count - 1, max(-1, count - STEPS - 1), -1):
            times = self._step(number)
            if times.step == step:
                return times
        return None

    def _step(self, number: int) -> StepTimes:
        at = _STEPS_AT + number % STEPS * _STEP_WORDS
        return StepTimes(*self._words[at : at + len(_Step)])

    def lines(self) -> list[str]:
        """The last lines of its log, the oldest first."""
        count = self._words[_Word.LINES]
        found = []
        for number in range(max(0, count - LINES), count):
            at = _LINES_AT + number % LINES * (_LINE_HEAD + LINE_BYTES)
            length = min(LINE_BYTES, int.from_bytes(self._bytes[at + 8 : at + _LINE_HEAD], "little"))
            found.append(
                bytes(self._bytes[at + _LINE_HEAD : at + _LINE_HEAD + length]).decode(errors="replace")
            )
        return found


class FlightRecorder:
    """The whole recorder of a ring."""

    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        """Without the file (a rank that no orchestrator has started) nobody reads what is written."""
        size = ranks * _ROW_BYTES + PLANS * SLOT_BYTES
        self._ranks = ranks
        self._map: mmap.mmap | None = None
        if create:
            path.write_bytes(bytes(size))
        if path.exists():
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)
        self._memory = memoryview(bytearray(size) if self._map is None else self._map)
        self.plans = PlanLog(self._memory[ranks * _ROW_BYTES :])

    @classmethod
    def beside(cls, board: Path, ranks: int, *, create: bool = False) -> "FlightRecorder":
        """The recorder of the ring that has its board there."""
        return cls(board.with_name("recorder"), ranks, create=create)

    def rank(self, rank: int) -> RankRecorder:
        """The row of `rank`, for the process that is this rank."""
        return RankRecorder(self._memory, rank * _ROW_BYTES)

    def read(self, rank: int) -> RankRecord:
        return RankRecord(self._memory, rank * _ROW_BYTES)

    def read_all(self) -> list[RankRecord]:
        return [self.read(rank) for rank in range(self._ranks)]


PLANS = 32
"""Plans that are kept."""
SLOT_BYTES = 8192
_HEAD = 12
"""Words at the beginning of a slot."""
_SEQUENCES = 128
_BLOCKS = 1024
_LENS_AT = _HEAD * 8
_TABLE_AT = _LENS_AT + 2 * 4 * _SEQUENCES
_NAMES_AT = _TABLE_AT + 4 * _BLOCKS
_NAMES_BYTES = SLOT_BYTES - _NAMES_AT


class PlannedSequence(msgspec.Struct, frozen=True):
    """One sequence of a step."""

    generation_id: str
    """Empty where there was no room for it."""
    tokens: int
    """Computed in this step, drafts included."""
    context: int
    """Tokens in the cache once it has run."""
    blocks: list[int]
    """Its block table, as far as there was room."""


class PlanRecord(msgspec.Struct, frozen=True):
    """What is kept of a plan."""

    step: int
    at: int
    """When it was made: nanoseconds, monotonic."""
    seconds: float
    """What the step has taken; 0 while it is under way."""
    tokens: int
    decodes: int
    sampled: int
    saves: int
    compressions: int
    restores: int
    pools: int
    sequence_count: int
    blocks: int
    """In all block tables."""
    sequences: list[PlannedSequence]
    """As many as there was room for."""


class PlanLog:
    """The slots; the leader writes, others read."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("q")
        self._made = 0

    def add(self, plan: "StepPlan", generation_ids: Sequence[str], block_size: int) -> None:
        """`generation_ids`: of the plan's sequences, in its order."""
        start = self._made % PLANS * SLOT_BYTES
        at = start // 8
        self._made += 1
        memory, words = self._memory, self._words
        words[at] = 0  # whoever reads the slot now is told so
        lens, contexts = plan.query_lens[: 4 * _SEQUENCES], plan.context_lens[: 4 * _SEQUENCES]
        table = plan.block_tables[: 4 * _BLOCKS]
        names = "\n".join(generation_ids).encode(errors="replace")[:_NAMES_BYTES]
        words[at + 1] = time.monotonic_ns()
        words[at + 2] = 0
        words[at + 3] = len(plan.token_ids) // 4 | plan.num_decodes << 32
        words[at + 4] = len(plan.sample_rows) // 4
        words[at + 5] = len(plan.saves) // 8
        words[at + 6] = len(plan.compressions) // 8
        words[at + 7] = len(plan.restores) // 8
        words[at + 8] = len(plan.pools) // 8
        words[at + 9] = len(plan.query_lens) // 4 | block_size << 32
        words[at + 10] = len(plan.block_tables) // 4
        words[at + 11] = len(names)
        lens_at = start + _LENS_AT
        memory[lens_at : lens_at + len(lens)] = lens
        lens_at += 4 * _SEQUENCES
        memory[lens_at : lens_at + len(contexts)] = contexts
        memory[start + _TABLE_AT : start + _TABLE_AT + len(table)] = table
        memory[start + _NAMES_AT : start + _NAMES_AT + len(names)] = names
        words[at] = plan.step

    def took(self, step: int, seconds: float) -> None:
        """`step`, of one of the last two plans, is over."""
        at = (self._made - 1) % PLANS * SLOT_BYTES // 8
        if self._words[at] != step:  # the next one was planned ahead
            at = (self._made - 2) % PLANS * SLOT_BYTES // 8
        self._words[at + 2] = int(seconds * 1e9)

    def read(self) -> list[PlanRecord]:
        """The plans that are kept, by step."""
        found = [record for slot in range(PLANS) if (record := self._read(slot)) is not None]
        return sorted(found, key=lambda record: record.step)

    def _read(self, slot: int) -> PlanRecord | None:
        data = bytes(self._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
        words = memoryview(data)[:_LENS_AT].cast("q").tolist()
        # Overwritten while it was copied: it is another step's by now, or none's.
        if not words[0] or self._words[slot * SLOT_BYTES // 8] != words[0]:
            return None
        low = 0xFFFFFFFF
        count, size = words[9] & low, words[9] >> 32
        return PlanRecord(
            step=words[0],
            at=words[1],
            seconds=words[2] / 1e9,
            tokens=words[3] & low,
            decodes=words[3] >> 32,
            sampled=words[4],
            saves=words[5],
            compressions=words[6],
            restores=words[7],
            pools=words[8],
            sequence_count=count,
            blocks=words[10],
            sequences=_sequences(data, min(count, _SEQUENCES), words[10], size, words[11]),
        )


def _sequences(data: bytes, count: int, blocks: int, size: int, names: int) -> list[PlannedSequence]:
    lens = _int32(data, _LENS_AT, count)
    contexts = _int32(data, _LENS_AT + 4 * _SEQUENCES, count)
    table = _int32(data, _TABLE_AT, min(blocks, _BLOCKS))
    ids = data[_NAMES_AT : _NAMES_AT + names].decode(errors="replace").split("\n") if names else []
    found, at = [], 0
    for number, (tokens, context) in enumerate(zip(lens, contexts, strict=True)):
        end = at + -(-context // max(1, size))
        name = ids[number] if number < len(ids) else ""
        found.append(PlannedSequence(name, tokens, context, table[at:end]))
        at = end
    return found


def _int32(data: bytes, at: int, count: int) -> list[int]:
    return memoryview(data)[at : at + 4 * count].cast("i").tolist()
