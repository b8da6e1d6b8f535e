"""A ring's draft head (EAGLE-3, MTP), which reads hidden states of the model that is served.

What it has computed behind its own proposals, with states of its own, is better computed again.
"""

from services.executor.scheduler.drafts.proposer import DraftingContext
from services.executor.scheduler.drafts.proposers.engine_drafts import EngineDrafts


class DraftHead(EngineDrafts):
    def _computed_for_good(self, before: int, known: int, computed: int) -> int:
        return min(known, max(before, self._full(computed)))  # within a block that it can rewrite


def draft_heads(context: DraftingContext) -> DraftHead | None:
    spec = context.spec
    return DraftHead("draft_head", context) if spec.drafts and spec.draft_reads_states else None
