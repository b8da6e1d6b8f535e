"""Features of steps: each can be taken out of the list, and the rest serves as ever."""

from typing import Any

import pytest

from services.executor.core.engine import EngineSpec
from services.executor.scheduler import batcher
from services.executor.scheduler.admission import NO_CHECKS, Admission
from services.executor.scheduler.features import prompt_results
from services.executor.scheduler.features.adapters import ADAPTERS
from services.executor.scheduler.features.base import Feature
from services.executor.scheduler.features.catalog import FEATURES
from services.executor.scheduler.features.prompt_results import PROMPT_RESULTS
from services.executor.scheduler.features.recurrent_states import RECURRENT_STATES
from services.executor.scheduler.features.segments import SEGMENTS
from services.executor.scheduler.features.sparse_choices import SPARSE_CHOICES
from shared.messages import SparseAttention
from tests.unit.executor.scheduler.drafts.test_proposers import Said
from tests.unit.executor.scheduler.fake_engine import VOCAB
from tests.unit.executor.scheduler.stepped_ring import Ring, ask, lens

ENGINES = {"plain": {}, "adapters": {"max_adapters": 2}, "whole": {"whole_prompts": True}, "states": {"num_states": 9}}
# Without its states a model of that kind computes nothing.
CASES = [(one, name) for one in FEATURES for name in ENGINES if (one, name) != (RECURRENT_STATES, "states")]


@pytest.mark.parametrize(("left_out", "engine"), CASES)
def test_without_one_feature_the_rest_serves(left_out: Feature, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "FEATURES", tuple(one for one in FEATURES if one is not left_out))
    assert len(Said([], **ENGINES[engine]).texts) == 3


# By feature, what it alone refuses.
REFUSED: dict[Feature, dict[str, Any]] = {
    ADAPTERS: {"adapter": "no digest"},
    PROMPT_RESULTS: {"prompt_logprobs": -2},
    SEGMENTS: {"second_segment": -1},
    SPARSE_CHOICES: {"sparse": SparseAttention()},
}


def test_every_feature_that_refuses_something_is_tried() -> None:
    assert set(REFUSED) == {feature for feature in FEATURES if feature.checks != NO_CHECKS}


@pytest.mark.parametrize("left_out", FEATURES)
def test_only_a_feature_knows_what_it_refuses(left_out: Feature) -> None:
    admission = Admission(EngineSpec(4, 64, 200, VOCAB), [one.checks for one in FEATURES if one is not left_out])
    taken = [one for one, fields in REFUSED.items() if admission.malformed(ask("a", 5, **fields)) is None]
    assert taken == [one for one in REFUSED if one is left_out]


# By feature: requests of which it limits the first step, the chunks of that, and what they would be without it.
LIMITED = {
    ADAPTERS: ([ask(name, 5, adapter=name * 64) for name in "ab"], [5], [5, 5]),
    PROMPT_RESULTS: ([ask("a", 12, prompt_logprobs=0)], [6], [12]),
}


@pytest.mark.parametrize("left_out", FEATURES)
@pytest.mark.parametrize("feature", LIMITED)
def test_only_a_feature_limits_steps(feature: Feature, left_out: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "FEATURES", tuple(one for one in FEATURES if one is not left_out))
    monkeypatch.setattr(prompt_results, "SCORED_LOGITS_BYTES", 4 * VOCAB * 6)
    ring = Ring(max_adapters=1)
    requests, limited, free = LIMITED[feature]
    for request in requests:
        ring.batcher.adapter_ready(request.adapter, "directory")
        ring.add(request)
    assert lens(ring.schedule()[0]) == (free if feature is left_out else limited)
