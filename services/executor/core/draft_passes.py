"""The forward passes of a draft model, as plans. Pure.

    followed    the rows of a step of the model that is served     keys and values of the same tokens, nothing sampled
    proposals   pass 0   (s) t ─▶ d1   context up to t             s: what the draft model has not computed yet
                pass 1   d1 ─▶ d2      context up to d1            one row of each sequence
                ...

The draft model may know fewer tokens and positions than the model that is served. What it does not know it computes as
token 0, and at its last position: what comes of that is a proposal that is not taken, at worst.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from services.executor.core.engine import DraftPlan
from services.executor.core.step_plan import Int32Array, StepPlan, as_int32, to_bytes


class DraftPasses:
    """The plans of one `DraftPlan`."""

    def __init__(self, draft: DraftPlan, block_size: int) -> None:
        plan = draft.plan
        self._plan, self._size = plan, block_size
        self.positions = as_int32(plan.positions)[as_int32(plan.sample_rows)]  # int32 [S]: of the last tokens
        self._slots = as_int32(draft.slots).reshape(len(self.positions), draft.count - 1)
        self._tables = as_int32(plan.block_tables)
        self._lengths = -(-as_int32(plan.context_lens) // block_size)
        starts = np.cumsum(self._lengths) - self._lengths
        # Of each entry of the tables, which one of its sequence's it is.
        self._within = np.arange(len(self._tables)) - np.repeat(starts, self._lengths)

    def plan(self, number: int, tokens: Sequence[int] = ()) -> StepPlan:
        """Pass `number`, which computes `tokens` [S]; pass 0 those of the plan, and copies its blocks."""
        contexts = self.positions + (number + 1)
        needed = np.repeat(-(-contexts // self._size), self._lengths)
        tables = to_bytes(self._tables[self._within < needed])
        if not number:
            return structs.replace(self._plan, context_lens=to_bytes(contexts), block_tables=tables)
        return StepPlan(
            step=self._plan.step + number,
            num_decodes=len(contexts),
            token_ids=to_bytes(np.asarray(tokens, np.int32)),
            positions=to_bytes(contexts - 1),
            slots=to_bytes(self._slots[:, number - 1]),
            query_lens=to_bytes(np.ones(len(contexts), np.int32)),
            context_lens=to_bytes(contexts),
            block_tables=tables,
            sample_rows=to_bytes(np.arange(len(contexts), dtype=np.int32)),
            traced=self._plan.traced,
            of_draft=True,
        )


def slots_before(plan: StepPlan, block_size: int) -> Int32Array:
    """int32 [T]: the slot of the token before each of `plan`, as block tables have its block; -1 where there is
    none."""
    slots, positions = as_int32(plan.slots), as_int32(plan.positions)
    counts, contexts = as_int32(plan.query_lens), as_int32(plan.context_lens)
    blocks = -(-contexts // block_size)
    tables, firsts = np.cumsum(blocks) - blocks, np.cumsum(counts) - counts
    begins = positions[firsts]
    ahead = as_int32(plan.block_tables)[tables + np.maximum(begins // block_size - 1, 0)]
    before = np.roll(slots, 1)
    before[firsts] = np.where(begins % block_size, slots[firsts] - 1, (ahead + 1) * block_size - 1)
    before[firsts[begins == 0]] = -1
    return before


def plan_for_draft(plan: StepPlan, vocab_size: int, context_length: int, names: Int32Array | None = None) -> StepPlan:
    """What a draft model that knows so many tokens and positions computes of `plan`: all rows, and the logits of those
    that are sampled where the plan is `of_draft`. `names`: its own token for each of the plan's, where it has another
    vocabulary."""
    tokens, positions = as_int32(plan.token_ids), as_int32(plan.positions)
    known = (tokens >= 0) & (tokens < (vocab_size if names is None else len(names)))
    if names is not None:
        tokens = names[np.where(known, tokens, 0)]
    return StepPlan(
        step=plan.step,
        num_decodes=plan.num_decodes,
        token_ids=plan.token_ids if names is None and known.all() else to_bytes(np.where(known, tokens, 0)),
        positions=plan.positions
        if (positions < context_length).all()
        else to_bytes(np.minimum(positions, context_length - 1)),
        slots=plan.slots,
        query_lens=plan.query_lens,
        context_lens=plan.context_lens,
        block_tables=plan.block_tables,
        sample_rows=plan.sample_rows if plan.of_draft else b"",
        compressions=plan.compressions,
        candidates=plan.candidates if plan.of_draft else b"",
        traced=plan.traced,
    )
