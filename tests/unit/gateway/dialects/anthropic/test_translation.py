"""Anthropic's requests as chat completions: what becomes of each block, and what is refused, by its place."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.anthropic.schemas import MessagesRequest
from services.gateway.dialects.anthropic.translation import chat_request, own_words, reasoning_fields
from services.gateway.intake import validation
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.templates import Traits
from shared.errors import ContextLengthExceeded
from shared.messages import ModelCard

USER = {"role": "user", "content": "Hi"}
CARD = ModelCard("m", 2048, 256, [0], "", 0)


def asked(messages: list[Any], **fields: Any) -> MessagesRequest:
    return msgspec.convert({"model": "m", "max_tokens": 2000, "messages": messages, **fields}, MessagesRequest)


def chat(messages: list[Any], **fields: Any) -> ChatCompletionRequest:
    made = chat_request(asked(messages, **fields), {})
    validation.check_chat(made)
    return made


def roles(request: ChatCompletionRequest) -> list[str]:
    return [message.role for message in request.messages]


def use(identity: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "f", "input": {"a": identity}}


def result(identity: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, **fields}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@st.composite
def conversations(draw: st.DrawFn) -> list[Any]:
    """Turns of user and assistant, each in one message or several, every call answered."""
    turns: list[Any] = []
    waiting: list[str] = []
    for number in range(draw(st.integers(1, 5))):
        blocks = [result(identity) for identity in waiting]
        blocks += [text(f"u{number}.{index}") for index in range(draw(st.integers(0 if blocks else 1, 2)))]
        turns += split(draw, "user", draw(st.permutations(blocks)))
        waiting = [f"call{number}.{index}" for index in range(draw(st.integers(0, 2)))]
        said = [text(f"a{number}")] if not waiting or draw(st.booleans()) else []
        thought = [{"type": "thinking", "thinking": f"t{number}", "signature": ""}] if draw(st.booleans()) else []
        turns += split(draw, "assistant", [*thought, *said, *map(use, waiting)])
    if waiting:
        turns.append({"role": "user", "content": [result(identity) for identity in waiting]})
    return turns


def split(draw: st.DrawFn, role: str, blocks: list[Any]) -> list[Any]:
    at = draw(st.integers(0, len(blocks)))
    return [{"role": role, "content": part} for part in (blocks[:at], blocks[at:]) if part]


@settings(max_examples=60)
@given(conversations())
def test_any_conversation_becomes_a_chat_that_says_the_same(turns: list[Any]) -> None:
    made = chat(turns)
    given_blocks = [block for turn in turns for block in turn["content"]]
    for role in ("user", "assistant"):
        said = [block["text"] for turn in turns if turn["role"] == role for block in turn["content"] if "text" in block]
        shown = [message.content for message in made.messages if message.role == role and message.content]
        assert "\n".join(map(str, shown)).split("\n") == (said or [""])
    calls = [call for message in made.messages for call in message.tool_calls or ()]
    assert [call.id for call in calls] == [block["id"] for block in given_blocks if block["type"] == "tool_use"]
    answered = [message.tool_call_id for message in made.messages if message.role == "tool"]
    assert sorted(map(str, answered)) == sorted(call.id for call in calls)
    assert bool(made.continue_final_message) is (made.messages[-1].role == "assistant")
    assert not any(one == two == "assistant" for one, two in zip(roles(made), roles(made)[1:], strict=False))


def test_what_becomes_of_each_block() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    parts = {"type": "document", "context": "C", "source": {"type": "content", "content": [text("P")]}}
    plain = {"type": "document", "source": {"type": "content", "content": "Q"}}
    found = {"type": "search_result", "title": "S", "source": "url", "content": [text("R")]}
    turns = [
        {"role": "user", "content": [document, parts, plain, found]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use("1"), use("2")]},
        {"role": "user", "content": [result("1", content="bad", is_error=True), result("2", content=[text("ok")])]},
        {"role": "system", "content": "Be brief."},
        USER,
    ]
    made = chat(turns, system=[text("Be"), text("kind.")])
    assert [(message.role, message.content) for message in made.messages] == [
        ("system", "Be\nkind."),
        ("user", "T\nD\nC\nP\nQ\nS\nurl\nR"),
        ("assistant", None),
        ("tool", "Error: bad"),
        ("tool", "ok"),
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert made.messages[2].reasoning_content is None


def test_what_becomes_of_each_field() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    made = chat(
        [USER],
        stop_sequences=["x"],
        stream=True,
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        metadata={"user_id": "u" * 300},
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert (made.max_completion_tokens, made.stop, made.stream) == (2000, ["x"], True)
    assert (made.temperature, made.top_p, made.top_k) == (0.5, 0.5, 5)
    assert (made.tool_choice, made.parallel_tool_calls) == ("required", False)
    assert made.safety_identifier == "u" * 300
    assert (made.tools[0].function.description, made.tools[0].function.strict) == ("d", True)
    assert made.response_format is not None
    assert chat([USER], metadata={"user_id": "u"}).safety_identifier == "u"
    assert chat([USER], tools=[tool], tool_choice={"type": "none"}).tool_choice == "none"


@pytest.mark.parametrize(
    ("turns", "param", "said"),
    [
        ([{"role": "user", "content": [result("x")]}], "messages[0].content[0].tool_use_id", "no tool_use"),
        ([USER, {"role": "assistant", "content": [use("1")]}], "messages[1].content[0]", "no tool_result"),
        ([USER, {"role": "assistant", "content": [use("1")]}, USER], "messages[1].content[0]", "'1'"),
        (
            [USER, {"role": "assistant", "content": [use("1")]}, {"role": "system", "content": "x"}],
            "messages[1].content[0]",
            "no tool_result",
        ),
        ([USER, {"role": "assistant", "content": [use("1"), use("1")]}], "messages[1].content[1].id", "another"),
        ([{"role": "user", "content": [use("1")]}], "messages[0].content[0]", "role 'assistant'"),
        ([{"role": "assistant", "content": [result("1")]}], "messages[0].content[0]", "role 'user'"),
        ([{"role": "user", "content": [text("a")] * 2049}] * 2, "messages", "limit parts"),
        ([{"role": "user", "content": []}], "messages[0].content", "at least one block"),
        ([USER, {"role": "assistant", "content": ""}], "messages[1].content", "the answer begins"),
        ([{"role": "user", "content": [{"type": "image", "source": 1}]}], "messages[0].content[0]", "not see"),
        (
            [
                USER,
                {"role": "assistant", "content": [use("1")]},
                {"role": "user", "content": [result("1", content=[{"type": "image", "source": 1}])]},
            ],
            "messages[2].content[0].content[0]",
            "does not see images",
        ),
    ],
)
def test_what_is_refused(turns: list[Any], param: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match=r"messages") as refused:
        chat(turns)
    assert refused.value.param == param
    assert said in refused.value.message


def test_the_thinking_of_each_kind_of_model() -> None:
    def fields(traits: Traits, **given: Any) -> tuple[dict[str, Any], list[str]]:
        return reasoning_fields(asked([USER], **given), CARD, traits)

    switch = Traits(reasoning="think", variables=frozenset(["enable_thinking"]))
    effort = Traits(reasoning="openai_gptoss", variables=frozenset(["reasoning_effort"]))
    plain = Traits()
    on, off = {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}
    assert fields(switch, **on) == ({"chat_template_kwargs": {"enable_thinking": True}}, [])
    assert fields(switch, **off) == ({"chat_template_kwargs": {"enable_thinking": False}}, [])
    assert fields(effort, **off) == ({}, ["thinking.type"])
    assert fields(effort, output_config={"effort": "low"}) == ({"reasoning_effort": "low"}, [])
    assert fields(plain, output_config={"effort": "low"}, **on) == ({}, ["output_config.effort"])
    assert fields(plain, **off) == ({}, [])
    with pytest.raises(InvalidParameter, match="does not support thinking"):
        fields(plain, thinking={"type": "enabled", "budget_tokens": 1024})


@pytest.mark.parametrize(
    ("param", "shown"),
    [
        ("stop[1]", "stop_sequences[1]"),
        ("max_completion_tokens", "max_tokens"),
        ("response_format.json_schema", "output_config.format"),
        ("tools[0].function.parameters", "tools[0].input_schema"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_errors_speak_of_the_clients_fields(param: str | None, shown: str | None) -> None:
    with pytest.raises(InvalidParameter) as refused, own_words():
        raise InvalidParameter(f"Invalid '{param}': no.", param=param, reason="invalid_value")
    assert (refused.value.param, refused.value.message) == (shown, f"Invalid '{shown}': no.")
    with pytest.raises(ContextLengthExceeded), own_words():
        raise ContextLengthExceeded("Too long.", param="messages")
