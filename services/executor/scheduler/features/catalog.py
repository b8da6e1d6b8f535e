"""The features of a ring's steps, in the order in which they are asked. Taking a line out takes the feature out."""

from services.executor.scheduler.features.adapters import ADAPTERS
from services.executor.scheduler.features.base import Feature
from services.executor.scheduler.features.hand_over import HAND_OVER
from services.executor.scheduler.features.prompt_results import PROMPT_RESULTS
from services.executor.scheduler.features.recurrent_states import RECURRENT_STATES
from services.executor.scheduler.features.segments import SEGMENTS
from services.executor.scheduler.features.sparse_choices import SPARSE_CHOICES

FEATURES: tuple[Feature, ...] = (RECURRENT_STATES, ADAPTERS, PROMPT_RESULTS, HAND_OVER, SEGMENTS, SPARSE_CHOICES)
