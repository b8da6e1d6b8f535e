"""Every field of the installed OpenAI client is declared: honoured, or refused by its name."""

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionContentPartTextParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat import completion_create_params as chat_create_params

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake import validation
from services.gateway.intake.decoding import decode
from services.gateway.intake.prompts.kv_cache import cache_ttl
from services.gateway.intake.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    Message,
    StreamOptions,
)
from services.gateway.intake.validation import marked

API_PAGE = (Path(__file__).parents[4] / "docs/api.md").read_text()
STRANGE = {"asks": "for something"}
NEUTRAL = marked(ChatCompletionRequest, "neutral") | marked(CompletionRequest, "neutral")
NEUTRAL_IN_MESSAGE = marked(Message, "neutral")

KINDS: list[tuple[type, type[msgspec.Struct]]] = [
    (chat_create_params.CompletionCreateParamsStreaming, ChatCompletionRequest),
    (chat_create_params.CompletionCreateParamsNonStreaming, ChatCompletionRequest),
    (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    (ChatCompletionStreamOptionsParam, StreamOptions),
    (ChatCompletionContentPartTextParam, ContentPart),
    *((kind, Message) for kind in typing.get_args(ChatCompletionMessageParam)),
]


def fields_of(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(("theirs", "ours"), KINDS)
def test_openais_fields_are_declared(theirs: type, ours: type[msgspec.Struct]) -> None:
    known = set(typing.get_type_hints(theirs))
    assert known
    assert known - fields_of(ours) == set()


def check(request: ChatCompletionRequest | CompletionRequest) -> None:
    if isinstance(request, ChatCompletionRequest):
        validation.check_chat(request)
    else:
        validation.check_completion(request)


def refused(request: ChatCompletionRequest | CompletionRequest) -> tuple[str, str | None]:
    with pytest.raises(InvalidParameter) as caught:
        check(request)
    return caught.value.reason, caught.value.param


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    chat = ChatCompletionRequest(model="m", messages=[Message("user", "Hi")])
    plain = CompletionRequest(model="m", prompt="Hi")
    request = chat if name in fields_of(ChatCompletionRequest) else plain
    assert refused(msgspec.structs.replace(request, **{name: STRANGE})) == ("unsupported_parameter", name)
    for value in (None, *NEUTRAL[name]):
        check(msgspec.structs.replace(request, **{name: value}))


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_what_is_taken_stands_in_the_page(kind: type[msgspec.Struct]) -> None:
    for name in fields_of(kind) - NEUTRAL.keys():
        assert f"`{name}`" in API_PAGE or f"`{name}." in API_PAGE, name


def with_message(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[Message(**({"role": "user", "content": "Hi"} | fields))])


@pytest.mark.parametrize("name", NEUTRAL_IN_MESSAGE)
def test_what_a_message_brings_besides_its_text_is_refused(name: str) -> None:
    field = f"messages[0].{name}"
    assert refused(with_message(**{name: "something"})) == ("unsupported_parameter", field)
    for neutral in (None, *NEUTRAL_IN_MESSAGE[name]):
        validation.check_chat(with_message(**{name: neutral}))


@pytest.mark.parametrize("name", ["image_url", "input_audio", "file", "refusal"])
def test_what_a_text_part_brings_besides_its_text_is_refused(name: str) -> None:
    part = ContentPart("text", "Hi", **{name: "something"})  # type: ignore[arg-type]
    field = f"messages[0].content[0].{name}"
    assert refused(with_message(content=[part])) == ("unsupported_parameter", field)
    taken = {"type", "text", "file", "refusal", "prompt_cache_breakpoint"}
    assert fields_of(ContentPart) - taken == marked(ContentPart, "neutral").keys()


def test_the_longest_time_that_a_cache_is_to_last_counts() -> None:
    def of(**fields: object) -> float:
        body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields)
        request = decode(body, msgspec.json.Decoder(ChatCompletionRequest))
        validation.check_chat(request)
        return cache_ttl(request)

    def parts(*ttls: str) -> list[dict[str, object]]:
        marks = [{"mode": "explicit"} | ({"ttl": ttl} if ttl else {}) for ttl in ttls]
        content = [{"type": "text", "text": "x", "prompt_cache_breakpoint": mark} for mark in marks]
        return [{"role": "user", "content": content}]

    assert of() == of(prompt_cache_retention="in_memory") == of(messages=parts("")) == 0
    assert of(prompt_cache_options={"mode": "implicit", "ttl": "30m"}) == 1800
    assert of(prompt_cache_options={"ttl": "30m"}, messages=parts("", "12h", "30m")) == 43200
    assert of(prompt_cache_retention="24h", messages=parts("12h")) == 86400
    assert of(prompt_cache_options={"mode": "explicit"}, prompt_cache_retention="24h") == -1
    assert of(prompt_cache_options={"mode": "explicit"}, messages=parts("")) == 0
    for wrong, param in (
        ({"prewarm": True}, "prompt_cache_options.prewarm"),
        ({"comparison_response_id": "resp_1"}, "prompt_cache_options.comparison_response_id"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            of(prompt_cache_options=wrong)
        assert (caught.value.reason, caught.value.param) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("assistant", [ContentPart("refusal", refusal="No.")]), "No."),
        (Message("assistant", None, refusal="No."), "No."),
        (Message("assistant", "Well.", refusal="No."), "Well.\nNo."),
        (Message("assistant", "Well.", refusal=""), "Well."),
    ],
)
def test_what_was_refused_was_said(message: Message, text: str) -> None:
    request = ChatCompletionRequest(model="m", messages=[Message("user", "Hi"), message])
    validation.check_chat(request)
    assert message.text == text


def test_a_part_has_what_its_type_says() -> None:
    for kind, other in (("text", "refusal"), ("refusal", "text")):
        part = ContentPart(kind, **{other: "x"})
        assert refused(with_message(content=[part])) == ("missing_required_parameter", f"messages[0].content[0].{kind}")
