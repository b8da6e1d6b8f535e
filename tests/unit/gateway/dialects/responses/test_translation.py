"""A response's request becomes a chat completion, and its errors keep the names that its client knows."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.responses.conversation.items import chat_messages, droppable, read_input
from services.gateway.dialects.responses.schemas import ResponseRequest, check_request
from services.gateway.dialects.responses.stream.items import Item
from services.gateway.dialects.responses.translation import chat_request, own_words, shown_fields
from services.gateway.intake.decoding import decode
from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.sampling.structured_output import wanted_by
from services.gateway.intake.validation import check_chat
from services.gateway.tokenizer.templates import Traits
from shared.errors import ContextLengthExceeded
from shared.messages import ModelCard

IDENTITY = "0123456789abcdef" * 2


def items_of(*given: Any) -> list[Item]:
    raw = [msgspec.Raw(msgspec.json.encode(item)) for item in given]
    return [item for item in read_input(raw, IDENTITY) if isinstance(item, dict)]


def test_calls_and_their_outputs_are_turns() -> None:
    items = items_of(
        {"role": "user", "content": "Add."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
    )
    user, assistant, one, two, last = chat_messages(items, None)
    assert user == {"role": "user", "content": "Add."}
    assert assistant["content"] == "I do."
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][1]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in (one, two)] == [
        ("tool", "c1", "1"),
        ("tool", "c2", "2"),
    ]
    assert (last["content"], len(last["tool_calls"])) == (None, 1)
    assert chat_messages(items, "Do.")[0] == {"role": "system", "content": "Do."}
    assert droppable(items) == [1, 2, 3, 5, 7]
    assert len({item["id"] for item in items}) == len(items)


def test_thoughts_belong_to_the_turn_behind_them() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "So."}
    user = {"role": "user", "content": "Go on."}
    turns = chat_messages(items_of(thought, said, user, thought, call, user, thought, user), None)
    shown = [
        (turn.get("reasoning_content"), turn["content"], "tool_calls" in turn)
        for turn in turns
        if turn["role"] == "assistant"
    ]
    assert shown == [("Hm.", "So.", False), ("Hm.", None, True), ("Hm.", "", False)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("messages", "input"),
        ("messages[3].content", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.type", "text.format.type"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("reasoning_effort", "reasoning.effort"),
        ("verbosity", "text.verbosity"),
        ("tools[2].function.parameters", "tools[2].parameters"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_errors_have_the_clients_names(theirs: str | None, ours: str | None) -> None:
    with pytest.raises(InvalidParameter) as caught, own_words():
        raise InvalidParameter(f"Invalid '{theirs}'.", param=theirs, reason="invalid_value")
    assert (caught.value.param, caught.value.message) == (ours, f"Invalid '{ours}'.")


def test_a_context_that_is_too_short_is_the_inputs_fault() -> None:
    with pytest.raises(ContextLengthExceeded) as caught, own_words():
        raise ContextLengthExceeded("reduce the messages or max_tokens", param="messages")
    assert caught.value.message == "reduce the input or max_output_tokens"


def test_what_the_chat_does_not_take_is_an_error_of_the_request() -> None:
    request = ResponseRequest(model="m", input="Hi", reasoning=None, max_output_tokens=3)
    made = chat_request(request, items_of({"role": "user", "content": "Hi"}))
    assert (made.model, made.max_completion_tokens, made.temperature) == ("m", 3, None)


KINDS = ["message", "function_call", "function_call_output", "reasoning", "item_reference", 5]
FIELDS = ["text", "tools", "tool_choice", "reasoning", "include", "metadata", "truncation", "top_logprobs"]
WORDS = st.sampled_from(["", "x", "user", "function", "auto", "text", "json_schema", "\u2603", *KINDS[:2]])
NAMES = st.sampled_from(["type", "role", "content", "text", "id", "name", "format", "schema", "tools", "mode"])
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(allow_nan=False), WORDS)
JSON: Any = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)), max_leaves=6
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "refusal", "x"])}, optional={"text": JSON, "refusal": JSON}
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS),
        "role": st.sampled_from(["user", "assistant", "system", "king", None]),
        "content": st.one_of(JSON, st.lists(PARTS, max_size=2)),
        "call_id": WORDS,
        "name": WORDS,
        "arguments": JSON,
        "output": JSON,
        "id": WORDS,
    },
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "input": st.one_of(JSON, st.lists(ITEMS, max_size=3))}, optional=dict.fromkeys(FIELDS, JSON)
)
CARD = ModelCard("m", 100, 100, [], "", 0)


def taken(body: dict[str, Any]) -> tuple[ResponseRequest, list[Item]]:
    """What becomes of `body` before its prompt is made. Raises `InvalidParameter`."""
    request = decode(msgspec.json.encode(body), msgspec.json.Decoder(ResponseRequest))
    check_request(request)
    items = [item for item in read_input(request.input or [], IDENTITY) if isinstance(item, dict)]
    with own_words():
        chat = chat_request(request, items)
        check_chat(chat)
        wanted_by(chat)
        plan_of(chat, CARD, Traits())
    return request, items


@settings(max_examples=200)
@given(BODIES)
def test_any_body_is_taken_or_refused_by_a_name_that_it_has(body: dict[str, Any]) -> None:
    refusal = None
    try:
        request, items = taken(body)
    except InvalidParameter as error:
        refusal = error
    if refusal is not None:
        assert refusal.message.endswith((".", ".'"))
        assert refusal.param is None or "messages" not in refusal.param
        return
    shown: dict[str, Any] = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": []}
    Response.model_validate(shown | shown_fields(request, 1.0, 1.0))
    msgspec.json.encode(items)
