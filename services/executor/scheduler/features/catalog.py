"""The features of a ring's steps, in the order in which they are asked. Taking a line out takes the feature out."""

from services.executor.scheduler.features.adapters import adapters
from services.executor.scheduler.features.base import FeatureMaker
from services.executor.scheduler.features.hand_over import hand_over
from services.executor.scheduler.features.prompt_results import prompt_results
from services.executor.scheduler.features.recurrent_states import recurrent_states
from services.executor.scheduler.features.segments import segments
from services.executor.scheduler.features.sparse_choices import sparse_choices

FEATURES: tuple[FeatureMaker, ...] = (
    recurrent_states,
    prompt_results,
    hand_over,
    adapters,
    segments,
    sparse_choices,
)
