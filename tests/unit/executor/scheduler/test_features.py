"""Features of steps: each can be taken out of the list, and the rest serves as ever."""

import pytest

from services.executor.scheduler import batcher
from services.executor.scheduler.features.base import Feature
from services.executor.scheduler.features.catalog import FEATURES
from services.executor.scheduler.features.recurrent_states import RECURRENT_STATES
from tests.unit.executor.scheduler.test_proposers import Said

ENGINES = {
    "plain": {},
    "adapters": {"max_adapters": 2},
    "whole": {"whole_prompts": True},
    "states": {"num_states": 9},
}
CASES = [(one, name) for one in FEATURES for name in ENGINES if (one, name) != (RECURRENT_STATES, "states")]
"""Without its states a model of that kind computes nothing."""


@pytest.mark.parametrize(("left_out", "engine"), CASES)
def test_without_one_feature_the_rest_serves(
    left_out: Feature, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "FEATURES", tuple(one for one in FEATURES if one is not left_out))
    assert len(Said([], **ENGINES[engine]).texts) == 3
