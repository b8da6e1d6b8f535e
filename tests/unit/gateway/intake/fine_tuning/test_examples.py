"""Lines of fine-tuning files: what they may be, and every way in which one is refused."""

import json
import re
from typing import Any

import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.fine_tuning.examples import check_pair, conversation_of, text_of_line, texts_of
from services.gateway.intake.fine_tuning.schemas import TextLine
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.templates import Traits
from services.gateway.tokenizer.turns import TextSegment, TrainedText
from shared.limits import MESSAGES, NESTING
from shared.messages.training import TrainingMethod
from tests.unit.gateway.tool_calls.test_templates import CALL, CARD, OTHER, TOOLS

HELLO = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Good day."}
CHAT = {"messages": [HELLO, ANSWER]}
PAIR = {
    "input": {"messages": [HELLO]},
    "preferred_output": [ANSWER],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}
TRAITS = Traits(tools=True, calls=True, several=True, family="hermes")


def read(line: Any, method: TrainingMethod = "supervised") -> list[Any]:
    return texts_of(line if isinstance(line, bytes) else json.dumps(line).encode(), method)


def refused(line: Any, method: TrainingMethod = "supervised") -> InvalidParameter:
    with pytest.raises(InvalidParameter) as error:
        read(line, method)
    return error.value


def trained(line: Any, traits: Traits = TRAITS) -> list[str]:
    """The messages that are trained, as the template gets them."""
    (text,) = read(line)
    assert isinstance(text, ChatCompletionRequest)
    conversation, indices = conversation_of(text, CARD, traits)
    assert all("weight" not in message for message in conversation.messages)
    return [str(conversation.messages[index]["content"]) for index in indices]


def test_every_assistant_message_is_trained_but_those_of_weight_0() -> None:
    later = [HELLO, {**ANSWER, "content": "Yes?"}]
    assert trained({"messages": [HELLO, ANSWER, *later]}) == ["Good day.", "Yes?"]
    assert trained({"messages": [HELLO, {**ANSWER, "weight": 0}, *later]}) == ["Yes?"]
    assert trained({"messages": [HELLO, {**ANSWER, "weight": 1}, HELLO, {**ANSWER, "weight": 0}]}) == ["Good day."]


def test_what_the_model_refuses_is_learned_as_text() -> None:
    assert trained({"messages": [HELLO, {"role": "assistant", "content": None, "refusal": "No."}]}) == ["No."]


def test_a_conversation_may_end_with_calls_and_has_the_tools_in_view() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]}
    (text,) = read({"messages": [HELLO, call], "tools": TOOLS, "parallel_tool_calls": True})
    conversation, indices = conversation_of(text, CARD, TRAITS)
    assert indices == [1]
    assert conversation.tools is not None
    assert [tool["function"]["name"] for tool in conversation.tools] == ["get_weather", "now"]
    assert len(conversation.messages[1]["tool_calls"]) == 2
    one_by_one = Traits(tools=True, calls=True, several=False, family="hermes")
    conversation, indices = conversation_of(text, CARD, one_by_one)
    assert indices == [1, 2], "a template that shows one call a message learns each"
    in_words = Traits(tools=False, calls=False)
    conversation, indices = conversation_of(text, CARD, in_words)
    assert "get_weather" in conversation.messages[indices[0]]["content"]


def test_a_plain_text_is_trained_behind_its_prompt() -> None:
    (line,) = read({"prompt": "2+2=", "completion": "4"})
    assert isinstance(line, TextLine)
    (piece,) = text_of_line(line).pieces
    assert (piece.text, piece.spans) == ("2+2=4", [(4, 5)])


def test_a_pair_is_two_conversations_of_which_the_ends_are_trained() -> None:
    line = {**PAIR, "input": {"messages": [HELLO, ANSWER, HELLO]}}
    preferred, other = read(line, "dpo")
    for text, said in ((preferred, "Good day."), (other, "What?")):
        conversation, indices = conversation_of(text, CARD, TRAITS)
        assert indices == [3]
        assert conversation.messages[3]["content"] == said


WRONG: list[tuple[Any, str, str | None, str]] = [
    (b"{", "invalid_json_line", None, "not parseable as valid JSON"),
    (b"[1]", "invalid_json_line", None, "not a JSON object"),
    (b'{"a":' + b"[" * 3000, "invalid_json_line", None, "nested too deeply|not parseable"),
    ({}, "missing_required_parameter", "messages", "messages"),
    ({"mesages": []}, "unknown_parameter", "mesages", "did you mean 'messages'"),
    ({"conversations": []}, "unknown_parameter", "conversations", "did you mean 'messages'"),
    ({**CHAT, "zzzz": 1}, "unknown_parameter", "zzzz", "leave it out"),
    (
        {"messages": [HELLO, {**ANSWER, "wieght": 1}]},
        "unknown_parameter",
        "messages[1].wieght",
        r"did you mean 'messages\[1\].weight'",
    ),
    ({"messages": []}, "empty_array", "messages", "minimum length 1"),
    ({"messages": [HELLO] * (MESSAGES.value + 1)}, "array_above_max_length", "messages", "limit messages"),
    ({"messages": "no"}, "invalid_type", "messages", "an array"),
    ({"messages": [HELLO]}, "no_assistant_message", "messages", "nothing to learn"),
    ({"messages": [HELLO, {**ANSWER, "weight": 0}]}, "no_trained_message", "messages", "weight 0"),
    ({"messages": [HELLO, {**ANSWER, "weight": 2}]}, "invalid_value", "messages[1].weight", "'0', '1'"),
    ({"messages": [HELLO, {**ANSWER, "weight": 0.5}]}, "invalid_type", "messages[1].weight", "integer"),
    ({"messages": [{**HELLO, "weight": 1}, ANSWER]}, "unsupported_parameter", "messages[0].weight", "only messages"),
    ({"messages": [ANSWER]}, "invalid_value", "messages[0]", "answers nothing"),
    ({"messages": [{"role": "robot", "content": ""}]}, "invalid_value", "messages[0].role", "assistant"),
    ({"messages": [HELLO, {"role": "assistant"}]}, "missing_required_parameter", "messages[1].content", "content"),
    ({"messages": [HELLO, {**ANSWER, "tool_calls": [CALL]}, HELLO, ANSWER]}, "invalid_value", "messages[1]", "call_1"),
    (
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": "1"}, ANSWER]},
        "invalid_value",
        "messages[0].tool_call_id",
        "there is no call 'x'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER]},
        "invalid_value",
        "messages[0].content[0].type",
        "text alone",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}, ANSWER]},
        "unsupported_parameter",
        "messages[0].content",
        "send their text",
    ),
    ({"prompt": "a", "completion": ""}, "empty_string", "completion", "at least one character"),
    ({"prompt": "a"}, "missing_required_parameter", "completion", "completion"),
    ({"prompt": "a", "response": "b"}, "unknown_parameter", "response", "did you mean 'completion'"),
    (PAIR, "invalid_value", "input", "the method dpo"),
]


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else 1


WRONG_PAIRS: list[tuple[Any, str, str, str]] = [
    (CHAT, "invalid_value", "messages", "the method supervised"),
    ({**PAIR, "preferred_output": []}, "empty_array", "preferred_output", "minimum length 1"),
    ({**PAIR, "preferred_output": [HELLO]}, "invalid_value", "preferred_output", "role 'assistant'"),
    ({**PAIR, "non_preferred_output": [ANSWER] * 2}, "invalid_value", "non_preferred_output", "one message"),
    ({**PAIR, "non_preferred_output": [ANSWER]}, "invalid_value", "non_preferred_output", "nothing to prefer"),
    (
        {**PAIR, "input": {"messages": [HELLO, {**ANSWER, "weight": 1}, HELLO]}},
        "unsupported_parameter",
        "input.messages[1].weight",
        "leave it out",
    ),
    (
        {**PAIR, "input": {"messages": [HELLO, {"role": "user"}]}},
        "missing_required_parameter",
        "input.messages[1].content",
        "content",
    ),
    (
        {**PAIR, "preferred_output": [{"role": "assistant"}]},
        "missing_required_parameter",
        "preferred_output[0].content",
        "content",
    ),
    ({**PAIR, "chosen": 1}, "unknown_parameter", "chosen", "did you mean 'preferred_output'"),
]


@pytest.mark.parametrize(
    ("method", "line", "reason", "param", "words"),
    [*(("supervised", *one) for one in WRONG), *(("dpo", *one) for one in WRONG_PAIRS)],
)
def test_a_line_is_refused(method: TrainingMethod, line: Any, reason: str, param: str | None, words: str) -> None:
    error = refused(line, method)
    assert (error.reason, error.param) == (reason, param)
    assert re.search(words, str(error))


def test_each_output_of_a_pair_is_one_text() -> None:
    text = TrainedText([TextSegment("a", [(0, 1)])])
    check_pair([text, text])
    with pytest.raises(InvalidParameter, match="one call"):
        check_pair([text, text, text])


def test_variables_of_the_template_are_those_it_looks_at() -> None:
    traits = Traits(tools=True, calls=True, family="hermes", variables=frozenset(["enable_thinking"]))
    (text,) = read({**CHAT, "chat_template_kwargs": {"enable_thinking": False}})
    conversation, _ = conversation_of(text, CARD, traits)
    assert conversation.options.variables == {"enable_thinking": False}
    with pytest.raises(InvalidParameter, match="does not use it"):
        conversation_of(text, CARD, TRAITS)
    (text,) = read({**CHAT, "chat_template_kwargs": {"enable_thinking": deep(NESTING.value + 2)}})
    with pytest.raises(InvalidParameter, match="nested too deeply"):
        conversation_of(text, CARD, traits)


def test_a_half_of_a_character_is_refused() -> None:
    assert refused(b'{"prompt": "\\ud800", "completion": "b"}').reason == "invalid_json_line"
