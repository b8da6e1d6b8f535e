"""The model's card says what the operator has chosen, and what does not go with the model is refused."""

from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from services.executor.core.engine import RING, EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.leader.group_leader import STALE, other_kind, others_of, with_parsers
from services.executor.leader.leader import max_drafts
from shared.errors import ConfigurationError
from shared.messages import EngineTraits, GroupLoad, GroupRecord, GroupTraits, ModelCard

CARD = ModelCard("m", 100, 256, [0], "", 0)


def test_the_card_has_the_parsers_of_the_settings() -> None:
    chosen = with_parsers(CARD, ExecutorSettings(tool_parser="granite", reasoning_parser="none"))
    assert (chosen.tool_parser, chosen.reasoning_parser) == ("granite", "none")
    assert with_parsers(CARD, ExecutorSettings()) == CARD


NOW = 1000.0
RECORD = GroupRecord(
    "other", "m", "ready", 1, [], GroupLoad(), heard_at=NOW, traits=GroupTraits(engine=EngineTraits("vllm", "vLLM 1"))
)


def test_a_group_that_serves_with_another_kind_of_engine_is_refused() -> None:
    ring, vllm = replace(CARD, engine=RING), replace(CARD, engine=EngineTraits("vllm", "vLLM 2", ["grammar"]))
    for state in ("ready", "busy"):
        record = replace(RECORD, state=state)
        (other,) = others_of([record], ring, "g")
        assert other_kind([other], ring, NOW) == record
        assert other_kind([other], vllm, NOW) is None, "one kind, whatever its version can"
    of_ring = replace(RECORD, traits=GroupTraits(["window"], engine=RING))
    assert other_kind([of_ring], vllm, NOW) == of_ring
    assert other_kind([of_ring, RECORD], ring, NOW) == RECORD
    assert other_kind([of_ring], ring, NOW) is None, "rings may differ"


@pytest.mark.parametrize(
    "changes",
    [
        *({"state": state} for state in ("starting", "draining", "hung", "gone")),
        {"group": "g"},
        {"model": "other"},
        {"heard_at": NOW - STALE - 1},
        {"traits": None},
        {"traits": GroupTraits(["window"])},
    ],
)
def test_a_group_that_has_left_or_its_own_past_or_an_older_version_is_no_other_kind(changes: dict[str, Any]) -> None:
    ring = replace(CARD, engine=RING)
    assert other_kind(others_of([replace(RECORD, **changes)], ring, "g"), ring, NOW) is None
    assert other_kind([replace(RECORD, heard_at=0.0)], ring, NOW) is not None, "not told when"


def test_an_unknown_parser_is_refused_at_the_start() -> None:
    with pytest.raises(ValidationError, match="hermes"):
        ExecutorSettings(tool_parser="hermetic")  # type: ignore[arg-type]


def test_a_model_with_recurrent_state_carries_as_many_drafts_as_there_are_slots_behind_them() -> None:
    plain, recurrent = EngineSpec(16, 8, 100, 256), EngineSpec(16, 8, 100, 256, num_states=4, state_blocks=2)
    assert max_drafts(ExecutorSettings(speculation="7"), plain) == 7
    for slots, most in ((5, 5), (60, 7)):
        assert max_drafts(ExecutorSettings(speculation="7"), replace(recurrent, draft_states=slots)) == most
    for setting in ("auto", "off", "0"):
        assert max_drafts(ExecutorSettings(speculation=setting), recurrent) == 0
    with pytest.raises(ConfigurationError, match="--speculation is 7, and the KV cache has no room"):
        max_drafts(ExecutorSettings(speculation="7"), recurrent)
