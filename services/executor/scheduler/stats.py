"""A batcher, looked at from outside: its load for schedulers, all of it for whoever looks into a ring, and how long
requests spend in each stage.

    accepted ──queue──▶ in the batch ──prefill──▶ first token ──decode──▶ end
                                                       └─ the only one: no decode

A sequence that gives up its blocks is in the stage that it was in; one that is cancelled tells nothing more.
No clock: the time (seconds, monotonic) comes in.
"""

from collections.abc import Collection, Iterable

import msgspec

from services.executor.core.engine import EngineSpec
from services.executor.ipc.board import BoardKind, RingBoard
from services.executor.scheduler.block_tables import BlockTables
from services.executor.scheduler.planning.step_planner import StepPlanner
from services.executor.scheduler.sequence import Ending, Sequence, SequenceState
from shared.messages import GroupLoad
from shared.messages.debugging import AllocatorDump, HolderDump


def view_of(
    planner: StepPlanner, tables: BlockTables, held: Collection[Sequence]
) -> tuple[list[Sequence], AllocatorDump]:
    """All sequences, and the KV blocks with all who hold some, the largest first, as they stand. Nothing of it may be
    changed."""
    sequences = [*planner.running, *planner.waiting, *held]
    blocks = tables.census()
    holders = [HolderDump("sequence", s.request.generation_id, s.blocks) for s in sequences if s.blocks]
    return sequences, msgspec.structs.replace(
        blocks,
        promised=sum(tables.missing(sequence) for sequence in planner.running),
        reserve=tables.reserve(len(planner.running)),
        holders=sorted([*holders, *blocks.holders], key=lambda holder: -holder.blocks),
    )


def load_of(planner: StepPlanner, tables: BlockTables, held: Collection[Sequence], spec: EngineSpec) -> GroupLoad:
    prompts = [s for s in planner.running if len(s.tokens) - s.num_computed > 1]
    unfinished = sum(planner.keeps_waiting(s) for s in prompts)
    return GroupLoad(
        running=len(planner.running),
        waiting=len(planner.waiting) + len(held),
        waiting_tokens=unfinished + sum(s.remaining for s in (*planner.waiting, *held)),
        free_blocks=tables.free_blocks(planner.running),
        total_blocks=spec.full_blocks,
    )


TELL_EVERY = 1.0  # seconds after which it is told how much of a prompt is computed, and between two times


class Stages:
    """Observes each stage once per attempt, when it is over."""

    def __init__(self, board: RingBoard | None = None) -> None:
        """`board`: where it is written down."""
        self._board = board

    def admitted(self, sequences: Iterable[Sequence], now: float) -> None:
        """These have a place in the batch now; one that had to give it up and has it again changes nothing."""
        for sequence in sequences:
            if not sequence.times.admitted:
                sequence.times.admitted = now
                self._observe(BoardKind.QUEUE, now - sequence.times.accepted)
                if self._board is not None:
                    self._board.count_queried(sequence.prompt_tokens)

    def drawn(self, sequence: Sequence, now: float, *, finished: bool) -> None:
        """`sequence` has its first token (or its vector), or its last, or both."""
        times = sequence.times
        if not times.first_token:
            times.first_token = now
            self._observe(BoardKind.PREFILL, now - times.admitted)
        elif finished:
            self._observe(BoardKind.DECODE, now - times.first_token)

    def progressed(self, sequences: Iterable[Sequence], now: float) -> list[Sequence]:
        """Those of these whose consumers are to be told now how much of their prompts is computed."""
        due = [
            s
            for s in sequences
            if s.remaining > 1
            and now - max(s.times.told, s.times.admitted) >= TELL_EVERY
            and s.times.admitted
            and s.state is SequenceState.RUNNING
            and s.ending is Ending.NONE
        ]
        for sequence in due:
            sequence.times.told = now
        return due

    def _observe(self, kind: BoardKind, seconds: float) -> None:
        if self._board is not None:
            self._board.observe(kind, max(0.0, seconds))
