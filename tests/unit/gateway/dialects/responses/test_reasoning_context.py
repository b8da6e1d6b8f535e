"""Whose reasoning a model gets again."""

from typing import Any, Literal

import pytest

from services.gateway.dialects.responses.schemas import ReasoningOptions, ResponseRequest
from services.gateway.dialects.responses.translation import chat_request

ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": "a"},
    {"type": "reasoning", "content": [{"text": "old"}]},
    {"type": "message", "role": "assistant", "content": "b"},
    {"type": "message", "role": "user", "content": "c"},
    {"type": "reasoning", "content": [{"text": "new"}]},
    {"type": "message", "role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
    ("context", "seen"),
    [(None, ["old", "new"]), ("auto", ["old", "new"]), ("all_turns", ["old", "new"]), ("current_turn", ["new"])],
)
def test_reasoning_is_shown_again(
    context: Literal["auto", "current_turn", "all_turns"] | None, seen: list[str]
) -> None:
    request = ResponseRequest(model="m", input="x", reasoning=ReasoningOptions(context=context))
    messages = chat_request(request, ITEMS).messages
    assert [message.reasoning_content for message in messages if message.reasoning_content] == seen
    assert [message.content for message in messages] == ["a", "b", "c", "d"]
