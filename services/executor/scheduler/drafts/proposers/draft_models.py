"""A ring's draft model: a smaller model beside the one that is served, which reads tokens alone (docs/adr/0033)."""

from services.executor.scheduler.drafts.proposer import DraftingContext
from services.executor.scheduler.drafts.proposers.engine_drafts import EngineDrafts


def draft_models(context: DraftingContext) -> EngineDrafts | None:
    spec = context.spec
    return EngineDrafts("draft_model", context) if spec.drafts and not spec.draft_reads_states else None
