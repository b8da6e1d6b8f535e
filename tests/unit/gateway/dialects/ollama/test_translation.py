"""Ollama's requests as chats: names, times, thinking, results of tools, and errors in the client's words."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.dialects.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from services.gateway.dialects.ollama.translation import (
    chat_of,
    checked,
    completion_of,
    names_of,
    own_words,
    seconds_of,
    tagged,
    thinking_of,
)
from services.gateway.intake.decoding import decode
from services.gateway.tokenizer.templates import Traits
from shared.errors import ContextLengthExceeded

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> OllamaChatRequest:
    body = json.dumps({"model": "m", "messages": HI} | fields).encode()
    return decode(body, msgspec.json.Decoder(OllamaChatRequest))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("a:latest", ["a:latest", "a"]),
        ("a", ["a", "a:latest"]),
        ("hf.co/org/a:Q4_K_M", ["hf.co/org/a:Q4_K_M", "org/a:Q4_K_M", "org/a:Q4_K_M:latest"]),
    ],
)
def test_names(name: str, names: list[str]) -> None:
    assert names_of(name) == names


@given(st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?(:[a-z0-9]{1,4})?", fullmatch=True))
def test_what_is_listed_is_found_again(name: str) -> None:
    assert name in names_of(tagged(name))
    assert tagged(tagged(name)) == tagged(name)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(5, 5.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25), ("-1", -1.0), ("-1m", -60.0), ("0", 0.0)],
)
def test_times(given: float | str, seconds: float) -> None:
    keep_alive = chat(keep_alive=given).keep_alive
    assert keep_alive is not None
    assert seconds_of(keep_alive) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "--1", "5m\n", True, [5]])
def test_what_is_no_time(given: Any) -> None:
    with pytest.raises(InvalidParameter, match="keep_alive"):
        chat(keep_alive=given)


def test_thinking() -> None:
    switch, effort = (
        Traits(variables=frozenset(["enable_thinking"])),
        Traits(variables=frozenset(["reasoning_effort"])),
    )
    assert thinking_of(True, "m", switch, reasons=True) == {"chat_template_kwargs": {"enable_thinking": True}}
    assert thinking_of("low", "m", switch, reasons=True) == thinking_of(True, "m", switch, reasons=True)
    assert thinking_of(False, "m", switch, reasons=True) == {"chat_template_kwargs": {"enable_thinking": False}}
    assert thinking_of("high", "m", effort, reasons=True) == {"reasoning_effort": "high"}
    for think in (True, False):
        assert thinking_of(think, "m", effort, reasons=True) == {}, "it can do nothing but reason"
    assert thinking_of(False, "m", Traits(), reasons=False) == {}
    with pytest.raises(RouteError, match='"m" does not support thinking'):
        thinking_of("low", "m", Traits(), reasons=False)


def test_results_belong_to_calls() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        *HI,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call, call, {"id": "x", **call}]},
        {"role": "tool", "content": "third", "tool_call_id": "x"},
        {"role": "tool", "content": "first", "tool_name": "f"},
        {"role": "tool", "content": "second"},
    ]
    made = chat_of(chat(messages=messages), "m").messages
    calls = made[1].tool_calls
    assert [one.function and one.function.arguments for one in calls] == ['{"a":1}'] * 3
    assert (made[1].content, made[1].reasoning_content) == (None, "Hm.")
    by_id = {message.tool_call_id: message.content for message in made[2:]}
    assert by_id == {calls[0].id: "first", calls[1].id: "second", "x": "third"}
    for result in ({"tool_name": "g"}, {"tool_call_id": "y"}):
        with pytest.raises(InvalidParameter, match=r"'messages\[2\]'"):
            chat_of(chat(messages=[*messages[:2], {"role": "tool", "content": "?", **result}]), "m")


def test_what_changes_nothing_is_named() -> None:
    options = {"num_gpu": 1, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "of_nobody": 1}
    assert checked(chat(options=options, shift=True, truncate=False)) == [
        "shift",
        "options.num_gpu",
        "options.mirostat_tau",
    ]


def test_a_model_without_a_template_is_given_the_texts() -> None:
    request = OllamaGenerateRequest(model="m", prompt="Hi", system="Be kind.", logprobs=True, top_logprobs=2)
    made = completion_of(request, "m")
    assert (made.prompt, made.logprobs, made.max_tokens, made.stream) == ("Be kind.\n\nHi", 2, None, True)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("max_tokens", "options.num_predict"),
        ("response_format.json_schema.schema", "format.schema"),
        ("messages[0].content", "prompt"),
        ("stop", "options.stop"),
        (None, None),
    ],
)
def test_errors_in_the_words_of_the_client(ours: str | None, theirs: str | None) -> None:
    with pytest.raises(InvalidParameter) as told, own_words(OllamaGenerateRequest(model="m")):
        raise InvalidParameter(f"Invalid '{ours}'.", param=ours, reason="x")
    assert (told.value.param, told.value.message) == (theirs, f"Invalid '{theirs}'.")


def test_a_conversation_that_is_too_long_in_the_words_of_the_client() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"shorten the messages or options\.num_predict"), own_words(chat()):
        raise ContextLengthExceeded("Please shorten the messages or max_tokens.", param="messages")
