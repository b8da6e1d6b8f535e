"""The leader's last step plans, as they are kept in the flight recorder: sizes and block ids, never tokens.

    slot   | step, times, sizes (words) | S, table blocks kept | query lens | context lens | block table | ids |

A plan is kept by copying parts of its arrays as they are; what does not fit into the slot is left out, and
the sizes say how much there was.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from services.executor.engine.plan import StepPlan

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
