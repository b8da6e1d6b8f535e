"""What a rank can draft with; the first kind that recognizes a directory takes it. Taking a line out takes the feature
out."""

from services.executor.worker.drafting.heads import Heads
from services.executor.worker.drafting.kind import DraftKind
from services.executor.worker.drafting.whole_models import WholeModels

DRAFT_KINDS: tuple[DraftKind, ...] = (Heads(), WholeModels())
