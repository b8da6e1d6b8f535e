"""The model's card says what the operator has chosen, and what does not go with the model is refused."""

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from services.executor.core.engine import EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.leader.group_leader import with_parsers
from services.executor.leader.leader import max_drafts
from shared.errors import ConfigurationError
from shared.messages import ModelCard

CARD = ModelCard("m", 100, 256, [0], "", 0)


def test_the_card_has_the_parsers_of_the_settings() -> None:
    chosen = with_parsers(CARD, ExecutorSettings(tool_parser="granite", reasoning_parser="none"))
    assert (chosen.tool_parser, chosen.reasoning_parser) == ("granite", "none")
    assert with_parsers(CARD, ExecutorSettings()) == CARD


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
