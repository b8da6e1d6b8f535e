"""The proposers of a ring. Taking a line out takes the feature out."""

from services.executor.scheduler.drafts.proposer import ProposerMaker
from services.executor.scheduler.drafts.proposers.draft_models import draft_heads, draft_models
from services.executor.scheduler.drafts.proposers.ngrams import ngrams

# Of two offers that promise as much the earlier one's is taken.
PROPOSERS: tuple[ProposerMaker, ...] = (draft_heads, draft_models, ngrams)
