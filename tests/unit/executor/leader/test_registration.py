"""The model's card says what the operator has chosen."""

import pytest
from pydantic import ValidationError

from services.executor.core.settings import ExecutorSettings
from services.executor.leader.leader import with_parsers
from shared.messages import ModelCard

CARD = ModelCard("m", 100, 256, [0], "", 0)


def test_the_card_has_the_parsers_of_the_settings() -> None:
    chosen = with_parsers(CARD, ExecutorSettings(tool_parser="granite", reasoning_parser="none"))
    assert (chosen.tool_parser, chosen.reasoning_parser) == ("granite", "none")
    assert with_parsers(CARD, ExecutorSettings()) == CARD


def test_an_unknown_parser_is_refused_at_the_start() -> None:
    with pytest.raises(ValidationError, match="hermes"):
        ExecutorSettings(tool_parser="hermetic")  # type: ignore[arg-type]
