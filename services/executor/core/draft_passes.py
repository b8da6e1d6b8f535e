"""The forward passes of a draft model, as plans. Pure.

    followed    the rows of a step of the model that is served     keys and values of the same tokens, nothing sampled
    proposals   pass 0   t  ─▶ d1      context up to t             one row of each sequence
                pass 1   d1 ─▶ d2      context up to d1
                ...

The draft model may know fewer tokens and positions than the model that is served. What it does not know it computes as
token 0, and at its last position: what comes of that is a proposal that is not taken, at worst.
"""

from collections.abc import Sequence

import numpy as np

from services.executor.core.engine import DraftPlan
from services.executor.core.step_plan import Int32Array, StepPlan, as_int32, to_bytes


class DraftPasses:
    """The plans of one `DraftPlan`."""

    def __init__(self, draft: DraftPlan, block_size: int) -> None:
        plan = draft.plan
        self._plan, self._size = plan, block_size
        self.positions = as_int32(plan.positions)
        """int32 [S]: of the last tokens."""
        self.tokens = as_int32(plan.token_ids)
        """int32 [S]: the last tokens."""
        self._slots = as_int32(draft.slots).reshape(len(self.positions), draft.count - 1)
        self._tables = as_int32(plan.block_tables)
        self._lengths = -(-as_int32(plan.context_lens) // block_size)
        starts = np.cumsum(self._lengths) - self._lengths
        self._within = np.arange(len(self._tables)) - np.repeat(starts, self._lengths)
        """Of each entry of the tables, which one of its sequence's it is."""

    def plan(self, number: int, tokens: Int32Array | Sequence[int]) -> StepPlan:
        """Pass `number` (from 0), which computes `tokens` [S]. Copies of blocks are the first one's."""
        contexts = self.positions + (number + 1)
        needed = np.repeat(-(-contexts // self._size), self._lengths)
        plan = self._plan
        return StepPlan(
            step=plan.step,
            num_decodes=len(contexts),
            token_ids=to_bytes(np.asarray(tokens, np.int32)),
            positions=to_bytes(contexts - 1),
            slots=to_bytes(self._slots[:, number - 1]) if number else plan.slots,
            query_lens=to_bytes(np.ones(len(contexts), np.int32)),
            context_lens=to_bytes(contexts),
            block_tables=to_bytes(self._tables[self._within < needed]),
            sample_rows=to_bytes(np.arange(len(contexts), dtype=np.int32)),
            saves=b"" if number else plan.saves,
            restores=b"" if number else plan.restores,
            adoptions=b"" if number else plan.adoptions,
            traced=plan.traced,
            of_draft=True,
        )


def plan_for_draft(plan: StepPlan, vocab_size: int, context_length: int) -> StepPlan:
    """What a draft model that knows so many tokens and positions computes of `plan`: all rows, and the logits of those
    that are sampled where the plan is `of_draft`."""
    tokens, positions = as_int32(plan.token_ids), as_int32(plan.positions)
    known = (tokens >= 0) & (tokens < vocab_size)
    return StepPlan(
        step=plan.step,
        num_decodes=plan.num_decodes,
        token_ids=plan.token_ids if known.all() else to_bytes(np.where(known, tokens, 0)),
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
