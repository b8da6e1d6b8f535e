"""Tools and response formats over gRPC: what the ring gets, what the client sees, and that it is shown again."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from tests.integration.gateway.api.grpc.conftest import Client, text_of
from tests.integration.gateway.api.grpc.test_errors import details, failure
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying
from tests.integration.gateway.intake.test_tools import ARGUMENTS, CALL, NOW, TEXT, TOOLS

USER = pb.ChatMessage(role=pb.ROLE_USER, content="Weather in Rome?")
FUNCTIONS = [
    pb.Function(
        name=function["name"],
        description=function.get("description"),
        parameters_json=json.dumps(function["parameters"]) if "parameters" in function else "",
    )
    for function in (tool["function"] for tool in TOOLS)
]
KNOWN = [pb.Tool(function=function) for function in FUNCTIONS]
SCHEMA = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 3}}, "required": ["b"]}'


def asking(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**({"model": MODEL, "messages": [USER], "tools": KNOWN} | fields))


async def events_of(call: Any) -> list[pb.GenerationEvent]:
    return [event async for event in call]


def calls_in(events: Sequence[pb.GenerationEvent]) -> list[pb.ToolCall]:
    """The calls of a choice, put together from their deltas."""
    calls: list[pb.ToolCall] = []
    for delta in (call for event in events for choice in event.choices for call in choice.tool_calls):
        if delta.index == len(calls):
            calls.append(pb.ToolCall(id=delta.id, name=delta.name))
        calls[delta.index].arguments += delta.arguments
    return calls


@pytest.mark.parametrize("whole", [False, True])
async def test_calls_and_their_results(client: Client, ring: FakeRing, whole: bool) -> None:
    ring.behave = saying(TEXT)
    output = pb.OutputOptions(whole=whole)
    events = await events_of(client.Chat(asking(output=output)))
    assert "The weather of some days." in bytes(ring.requests[0].prompt).decode()
    calls = calls_in(events)
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert text_of(events) == "Let me see."
    finish = [choice.finish_reason for event in events for choice in event.choices][-1]
    assert finish == pb.FINISH_REASON_TOOL_CALLS
    ring.behave = saying("It is noon.")
    messages = [
        USER,
        pb.ChatMessage(role=pb.ROLE_ASSISTANT, tool_calls=calls),
        *(pb.ChatMessage(role=pb.ROLE_TOOL, tool_call_id=call.id, content="fine") for call in calls),
    ]
    assert text_of(await events_of(client.Chat(asking(messages=messages)))) == "It is noon."
    prompt = bytes(ring.requests[1].prompt)
    assert CALL.encode() in prompt
    assert prompt.count(b"<tool_response>\nfine\n</tool_response>") == 2
    said = pb.Conversation(messages=messages, tools=KNOWN)
    tokens = await client.Tokenize(pb.TokenizeRequest(model=MODEL, conversation=said))
    assert bytes(tokens.token_ids) == prompt


@pytest.mark.parametrize(
    ("choice", "functions"),
    [
        (pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), {"get_weather", "now"}),
        (pb.ToolChoice(function="now"), {"now"}),
        (pb.ToolChoice(allowed=pb.AllowedTools(mode=pb.TOOL_MODE_REQUIRED, functions=["now"])), {"now"}),
        (pb.ToolChoice(allowed=pb.AllowedTools(functions=["now"])), set()),
        (pb.ToolChoice(mode=pb.TOOL_MODE_AUTO), set()),
        (pb.ToolChoice(mode=pb.TOOL_MODE_NONE), None),
    ],
)
async def test_choices(client: Client, ring: FakeRing, choice: pb.ToolChoice, functions: set[str] | None) -> None:
    """`functions`: those of which one is demanded; None: the model is told of none."""
    ring.behave = saying(NOW)
    events = await events_of(client.Chat(asking(tool_choice=choice)))
    (request,) = ring.requests
    assert (b"<tools>" in bytes(request.prompt)) == (functions is not None)
    assert [call.name for call in calls_in(events)] == ([] if functions is None else ["now"])
    if functions:
        assert request.grammar is not None
        assert {name for name in ("get_weather", "now") if name in request.grammar.text} == functions
    else:
        assert request.grammar is None


async def test_one_call_at_a_time_and_strict_functions(client: Client, ring: FakeRing) -> None:
    ring.behave = saying(TEXT)
    one = await events_of(client.Chat(asking(parallel_tool_calls=False)))
    assert len(calls_in(one)) == 1
    strict = pb.Function()
    strict.CopyFrom(FUNCTIONS[0])
    strict.strict = True
    await events_of(client.Chat(asking(tools=[pb.Tool(function=strict)])))
    assert ring.requests[1].grammar is not None


FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"json_object": pb.JsonObject()}, "json_schema", "object"),
    ({"json_schema": pb.JsonSchema(schema_json=SCHEMA)}, "json_schema", '"b":{"type":"integer"},"a":'),
    ({"json_schema": pb.JsonSchema(name="x", schema_json="{}")}, "json_schema", "{}"),
    ({"regex": "[a-z]+ü"}, "regex", "[a-z]+ü"),
    ({"grammar": 'start: "yes" | "no"'}, "lark", 'start: "yes" | "no"'),
    ({"choice": pb.Choices(texts=["yes", "no"])}, "regex", "yes|no"),
]


@pytest.mark.parametrize(("given", "kind", "text"), FORMATS)
async def test_formats(client: Client, ring: FakeRing, given: dict[str, Any], kind: str, text: str) -> None:
    format_ = pb.ResponseFormat(**given)
    await events_of(client.Chat(asking(tools=[], response_format=format_)))
    await events_of(client.Generate(pb.GenerateRequest(model=MODEL, text="x", response_format=format_)))
    assert len(ring.requests) == 2
    for request in ring.requests:
        assert request.grammar.kind == kind
        assert text in request.grammar.text


async def test_a_session_takes_both(client: Client, ring: FakeRing) -> None:
    ring.behave = saying(CALL)
    call = client.ChatSession()
    await call.write(pb.ChatSessionRequest(id="a", chat=asking()))
    events = []
    while (message := await call.read()).WhichOneof("result") == "event":
        events.append(message.event)
    assert [made.name for made in calls_in(events)] == ["get_weather"]
    regex = pb.GenerateRequest(model=MODEL, text="x", response_format=pb.ResponseFormat(regex="a"))
    await call.write(pb.ChatSessionRequest(id="b", generate=regex))
    while (await call.read()).WhichOneof("result") != "done":
        pass
    assert ring.requests[1].grammar is not None
    await call.done_writing()


async def test_calls_are_shown_again_by_another_gateway_and_for_a_key(
    client: Client, nats_settings: CommonSettings, ring: FakeRing
) -> None:
    ring.behave = saying(TEXT)
    key = [("idempotency-key", "k")]
    events = await events_of(client.Chat(asking(), metadata=key))
    again = await events_of(client.Chat(asking(), metadata=key))
    assert calls_in(again) == calls_in(events)
    assert len(ring.requests) == 1
    other = asking(tools=KNOWN[:1])
    assert (await failure(client.Chat(other, metadata=key))).code() == grpc.StatusCode.ALREADY_EXISTS
    async with run_gateway(nats_settings, grpc_port=0) as elsewhere, Client(elsewhere.service.grpc_address) as its:
        attach = pb.AttachRequest(generation_id=events[0].id)
        assert calls_in(await events_of(its.Attach(attach))) == calls_in(events)
        middle = next(event.position for event in events if event.choices and event.choices[0].tool_calls)
        rest = await events_of(its.Attach(pb.AttachRequest(generation_id=events[0].id, position=middle)))
        seen = [event for event in events if int(event.position) <= int(middle)]
        assert calls_in([*seen, *rest]) == calls_in(events)


def formatted(**fields: Any) -> pb.ChatRequest:
    return asking(tools=[], response_format=pb.ResponseFormat(**fields))


def with_function(**fields: Any) -> pb.ChatRequest:
    return asking(tools=[pb.Tool(function=pb.Function(**fields))])


WRONG = [
    (asking(tools=[pb.Tool()]), "MISSING_REQUIRED_PARAMETER", "tools[0].function"),
    (with_function(), "EMPTY_STRING", "tools[0].function.name"),
    (with_function(name="a", parameters_json="{"), "INVALID_JSON", "tools[0].function.parameters_json"),
    (
        with_function(name="a", parameters_json='{"type": "array"}'),
        "INVALID_FUNCTION_PARAMETERS",
        "tools[0].function.parameters_json",
    ),
    (asking(tool_choice=pb.ToolChoice()), "MISSING_REQUIRED_PARAMETER", "tool_choice.choice"),
    (asking(tool_choice=pb.ToolChoice(mode=9)), "INVALID_VALUE", "tool_choice.mode"),
    (asking(tool_choice=pb.ToolChoice(function="x")), "INVALID_VALUE", "tool_choice.function"),
    (asking(tool_choice=pb.ToolChoice(allowed={})), "EMPTY_ARRAY", "tool_choice.allowed.functions"),
    (
        asking(tool_choice=pb.ToolChoice(allowed={"mode": pb.TOOL_MODE_NONE, "functions": ["now"]})),
        "INVALID_VALUE",
        "tool_choice.allowed.mode",
    ),
    (formatted(), "MISSING_REQUIRED_PARAMETER", "response_format.format"),
    (formatted(json_schema=pb.JsonSchema()), "MISSING_REQUIRED_PARAMETER", "response_format.json_schema.schema_json"),
    (
        formatted(json_schema=pb.JsonSchema(schema_json="[" * 5000)),
        "INVALID_JSON",
        "response_format.json_schema.schema_json",
    ),
    (formatted(json_schema=pb.JsonSchema(schema_json='{"type": "nonsense"}')), "INVALID_GRAMMAR", "response_format"),
    (formatted(regex="("), "INVALID_GRAMMAR", "response_format.regex"),
    (formatted(grammar=""), "EMPTY_STRING", "response_format.grammar"),
    (formatted(choice=pb.Choices()), "EMPTY_ARRAY", "response_format.choice"),
    (
        asking(messages=[USER, pb.ChatMessage(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(id="a")])]),
        "INVALID_VALUE",
        "messages[1]",
    ),
]


async def test_what_is_wrong_is_named_as_the_client_knows_it(client: Client, ring: FakeRing) -> None:
    for request, reason, field in WRONG:
        error = await failure(client.Chat(request))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, request
        shown = details(error)
        assert (shown["ErrorInfo"].reason, shown["BadRequest"].field_violations[0].field) == (reason, field)
        assert "structured_outputs" not in (error.details() or "")
    assert ring.requests == []
