"""A ring's draft model (docs/adr/0033): a smaller one beside that which is served, which reads tokens alone; or a draft
head (EAGLE-3, MTP), which reads hidden states of the model that is served."""

from services.executor.scheduler.drafts.engine_drafts import EngineDrafts
from services.executor.scheduler.drafts.proposer import DraftingContext


class DraftHead(EngineDrafts):
    """What it has computed behind its own proposals, with states of its own, is better computed again."""

    def _computed_for_good(self, before: int, known: int, computed: int) -> int:
        return min(known, max(before, self._full(computed)))  # within a block that it can rewrite


def draft_models(context: DraftingContext) -> EngineDrafts | None:
    spec = context.spec
    return EngineDrafts("draft_model", context) if spec.drafts and not spec.draft_reads_states else None


def draft_heads(context: DraftingContext) -> DraftHead | None:
    spec = context.spec
    return DraftHead("draft_head", context) if spec.drafts and spec.draft_reads_states else None
