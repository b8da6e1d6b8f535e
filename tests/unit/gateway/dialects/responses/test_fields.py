"""Every field of the installed client's Responses API is declared: honoured, or refused by its name."""

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import responses as theirs
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_param,
    response_text_config_param,
)
from openai.types.shared_params import reasoning

from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.responses import schemas
from services.gateway.dialects.responses.schemas import (
    InputTokensRequest,
    ResponseRequest,
    check_input_fields,
    check_request,
)
from services.gateway.intake.validation import marked

PAGE = (Path(__file__).parents[5] / "docs" / "responses.md").read_text()

NEUTRAL = marked(ResponseRequest, "neutral") | marked(InputTokensRequest, "neutral")
KINDS: list[tuple[type, type[msgspec.Struct]]] = [
    (response_create_params.ResponseCreateParamsStreaming, ResponseRequest),
    (response_create_params.ResponseCreateParamsNonStreaming, ResponseRequest),
    (response_create_params.StreamOptions, schemas.ResponseStreamOptions),
    (input_token_count_params.InputTokenCountParams, InputTokensRequest),
    (response_text_config_param.ResponseTextConfigParam, schemas.TextOptions),
    (reasoning.Reasoning, schemas.ReasoningOptions),
    (theirs.EasyInputMessageParam, schemas.MessageItem),
    (response_input_param.Message, schemas.MessageItem),
    (theirs.ResponseOutputMessageParam, schemas.MessageItem),
    (theirs.ResponseFunctionToolCallParam, schemas.FunctionCallItem),
    (response_input_param.FunctionCallOutput, schemas.CallOutputItem),
    (theirs.ResponseReasoningItemParam, schemas.ReasoningItem),
    (response_input_param.ItemReference, schemas.ItemReference),
    (theirs.ResponseInputTextParam, schemas.Part),
    (theirs.ResponseInputImageParam, schemas.Part),
    (theirs.ResponseInputFileParam, schemas.Part),
    (theirs.response_output_text_param.ResponseOutputTextParam, schemas.Part),
    (theirs.response_output_refusal_param.ResponseOutputRefusalParam, schemas.Part),
]


@pytest.mark.parametrize(("given", "ours"), KINDS)
def test_openais_fields_are_declared(given: type, ours: type[msgspec.Struct]) -> None:
    known = set(typing.get_type_hints(given))
    assert known
    assert known - {field.encode_name for field in msgspec.structs.fields(ours)} == set()


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    request: Any = ResponseRequest(model="m", input="Hi")
    check = check_request
    if name not in {field.encode_name for field in msgspec.structs.fields(ResponseRequest)}:
        request, check = InputTokensRequest(model="m", input="Hi"), check_input_fields  # type: ignore[assignment]
    with pytest.raises(InvalidParameter) as caught:
        check(msgspec.structs.replace(request, **{name: {"asks": "for something"}}))
    assert (caught.value.reason, caught.value.param) == ("unsupported_parameter", name)
    for value in (None, *NEUTRAL[name]):
        check(msgspec.structs.replace(request, **{name: value}))


@pytest.mark.parametrize("kind", [ResponseRequest, InputTokensRequest])
def test_the_page_names(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        assert f"`{field.encode_name}" in PAGE, field.encode_name


def test_the_pages_name_the_codes() -> None:
    root = Path(__file__).parents[5]
    pages = PAGE + (root / "docs" / "api.md").read_text()
    gateway = root / "services" / "gateway"
    files = [*(gateway / "intake" / "responses").glob("*.py"), gateway / "persistence" / "responses.py"]
    source = "".join(path.read_text() for path in files)
    codes = set(re.findall(r'reason="(\w+)"', source))
    assert "response_not_found" in codes
    assert {code for code in codes if f"`{code}`" not in pages} == set()
