"""Tools of a response's request: namespaces opened, searches left out, and errors at the client's own places."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.dialects.responses.conversation.items import chat_messages, read_input
from services.gateway.dialects.responses.schemas import ResponseRequest, check_request
from services.gateway.dialects.responses.stream.events import ResponseEvents
from services.gateway.dialects.responses.stream.items import ResponseShape
from services.gateway.dialects.responses.tools import ignored_in_tools, placed_tools
from services.gateway.dialects.responses.translation import chat_request, own_words, shown_fields
from services.gateway.intake.prompts.chat import asked_of
from services.gateway.tokenizer.tokenizer import StubTokenizer
from shared.messages import GenerationRequest, SamplingParams
from shared.messages.records import GenerationRecord, ResponseRecord

IDENTITY = "0123456789abcdef" * 2
GET: dict[str, Any] = {"type": "function", "name": "get", "parameters": {"type": "object"}}
CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [GET, {"type": "custom", "name": "put", "defer_loading": True}],
}
HELLO: Any = [{"type": "message", "role": "user", "content": "Hi"}]
SEARCH = {"type": "web_search", "external_web_access": False}


def request_of(*tools: Any, **fields: Any) -> ResponseRequest:
    body = json.dumps({"model": "m", "input": "Hi", "tools": tools, **fields})
    return msgspec.json.decode(body, type=ResponseRequest)


def test_namespaces_are_opened_and_searches_left_out() -> None:
    request = request_of(SEARCH, CRM, GET, client_metadata={"thread": "1"})
    check_request(request)
    assert [placed.path for placed in placed_tools(request.tools)] == [
        "tools[1].tools[0]",
        "tools[1].tools[1]",
        "tools[2]",
    ]
    assert [function.name for function in asked_of(chat_request(request, HELLO)).functions] == [
        "crm__get",
        "crm__put",
        "get",
    ]
    assert ignored_in_tools(request.tools) == [
        "tools[0].web_search",
        "tools[1].description",
        "tools[1].tools[1].defer_loading",
    ]


def test_a_tool_of_a_namespace_is_chosen() -> None:
    choice = {"type": "function", "namespace": "crm", "name": "get"}
    asked = asked_of(chat_request(request_of(CRM, GET, tool_choice=choice), HELLO))
    assert [function.name for function in asked.functions] == ["crm__get"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([SEARCH, {"type": "file_search", "vector_store_ids": []}], "tools[1].type"),
        ([{"type": "namespace", "name": "crm"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "c r m", "tools": []}], "tools[0].name"),
        ([SEARCH, {**CRM, "tools": [{"type": "mcp"}]}], "tools[1].tools[0].type"),
        ([SEARCH, {**CRM, "tools": [GET, {**GET, "surprise": 1}]}], "tools[1].tools[1].surprise"),
        ([SEARCH, {**CRM, "tools": [{**GET, "parameters": {"type": "array"}}]}], "tools[1].tools[0].parameters"),
    ],
)
def test_what_is_wrong_is_told_where_it_stands(tools: list[Any], param: str) -> None:
    request = request_of(*tools)
    with pytest.raises(InvalidParameter) as caught:
        ask(request)
    assert caught.value.param == param


def ask(request: ResponseRequest) -> None:
    check_request(request)
    with own_words(request):
        asked_of(chat_request(request, HELLO))


def test_calls_go_to_the_model_by_the_name_that_it_knows_and_to_the_client_by_its_own() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}", "namespace": "crm"}
    items: Any = read_input([msgspec.Raw(json.dumps(call).encode())], IDENTITY)
    assert chat_messages(items, None)[0]["tool_calls"][0]["function"]["name"] == "crm__get"
    shown = shown_fields(request_of(CRM, SEARCH), 1.0, 1.0)
    assert shown["tools"] == [CRM, SEARCH]
    generation = GenerationRequest(IDENTITY, "r", "m", "c", [1], 1, SamplingParams())
    record = GenerationRecord(
        IDENTITY, "responses", 0.0, [generation], response=ResponseRecord(msgspec.json.encode(shown), b"[]")
    )
    events = ResponseEvents(ResponseShape(record, StubTokenizer()))
    events.call("c1", "crm__get")
    events.arguments("{}")
    events.call("c2", "get")
    first, second = events.response()["output"]
    assert (first["namespace"], first["name"], first["arguments"]) == ("crm", "get", "{}")
    assert "namespace" not in second
