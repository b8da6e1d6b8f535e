"""A batcher, looked at from outside: for schedulers, and for whoever looks into a ring."""

from collections.abc import Collection
from typing import NamedTuple

from services.executor.engine.block_tables import BlockTables
from services.executor.engine.protocol import EngineSpec
from services.executor.engine.sequence import Sequence
from services.executor.engine.step_planning import StepPlanner
from services.executor.kv_cache.census import Census
from shared.messages import GroupLoad


class BatcherView(NamedTuple):
    """A batcher, looked into."""

    sequences: list[Sequence]
    spec: EngineSpec
    blocks: Census
    promised: int
    """Blocks that running sequences will still need."""
    reserve: int
    """Blocks that an admission leaves to them."""


def view_of(
    planner: StepPlanner, tables: BlockTables, held: Collection[Sequence], spec: EngineSpec
) -> BatcherView:
    """All there is, as it stands. Nothing of it may be changed."""
    missing = sum(tables.missing(sequence) for sequence in planner.running)
    reserve = tables.reserve(len(planner.running))
    sequences = [*planner.running, *planner.waiting, *held]
    return BatcherView(sequences, spec, tables.census(), missing, reserve)


def load_of(
    planner: StepPlanner, tables: BlockTables, held: Collection[Sequence], spec: EngineSpec
) -> GroupLoad:
    """How full the ring is."""
    unfinished = sum(s.remaining for s in planner.running if s.remaining > 1)
    return GroupLoad(
        running=len(planner.running),
        waiting=len(planner.waiting) + len(held),
        waiting_tokens=unfinished + sum(s.remaining for s in (*planner.waiting, *held)),
        free_blocks=tables.free_blocks(planner.running),
        total_blocks=spec.kept_blocks,
    )
