"""Custom tools, as the official client sends and reads them: their input is text, and no JSON."""

import json
from typing import Any

import openai

from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying

SCRIPT = 'print("h\u00ef")\n'
CALL = "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"input": SCRIPT}}) + "\n</tool_call>"
USER: Any = {"role": "user", "content": "Greet me."}
TOOL: Any = {"name": "python", "description": "Runs a script."}
REGEX: Any = {"syntax": "regex", "definition": "[a-z]+ [0-9]"}


async def test_a_chat_calls_and_gets_its_result(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    tools: Any = [{"type": "custom", "custom": TOOL}]
    ring.behave = saying(CALL)
    answer = await client.chat.completions.create(model=MODEL, messages=[USER], tools=tools)
    assert "Runs a script." in bytes(ring.requests[0].prompt).decode("latin-1")
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or ()
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input, choice.finish_reason) == ("python", SCRIPT, "tool_calls")
    stream = await client.chat.completions.create(model=MODEL, messages=[USER], tools=tools, stream=True)
    deltas: list[Any] = [
        one async for chunk in stream for one in chunk.model_dump()["choices"][0]["delta"]["tool_calls"] or ()
    ]
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "python")
    assert "".join(delta["custom"]["input"] for delta in deltas) == SCRIPT
    ring.behave = saying("Done.")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "hi"}
    messages = [USER, choice.message.model_dump(exclude_none=True), result]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    prompt = bytes(ring.requests[-1].prompt).decode("latin-1")
    assert json.dumps({"input": SCRIPT}, ensure_ascii=False) in prompt
    assert "<tool_response>\nhi\n</tool_response>" in prompt


async def test_a_format_is_held(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    for choice in ("required", {"type": "custom", "custom": {"name": "python"}}):
        tool = TOOL | {"format": {"type": "grammar", "grammar": REGEX}}
        tools: Any = [{"type": "custom", "custom": tool}]
        await client.chat.completions.create(
            model=MODEL,
            messages=[USER],
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        grammar = ring.requests[-1].grammar
        assert '"pattern":"^(?:[a-z]+ [0-9])$"' in grammar.text


async def test_a_response_calls_and_gets_its_result(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    tools: Any = [{"type": "custom", **TOOL, "format": {"type": "text"}}]
    ring.behave = saying(CALL)
    stream = await client.responses.create(model=MODEL, input="Greet me.", tools=tools, stream=True)
    events: list[Any] = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert "".join(deltas) == done.input == SCRIPT
    assert len(deltas) > 1
    response = events[-1].response
    (call,) = response.output
    assert (call.type, call.name, call.input, call.id) == ("custom_tool_call", "python", SCRIPT, done.item_id)
    ring.behave = saying("Done.")
    output: Any = {
        "type": "custom_tool_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "hi"}],
        "caller": {"type": "direct"},
    }
    await client.responses.create(model=MODEL, input=[output], previous_response_id=response.id)
    assert "hi" in bytes(ring.requests[-1].prompt).decode("latin-1")
    again: Any = [USER, call.model_dump(exclude_none=True), output]
    last = await client.responses.create(model=MODEL, input=again, tools=tools)
    items = (await client.responses.input_items.list(last.id, order="asc")).model_dump(exclude_none=True)["data"]
    assert [item["type"] for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert (items[1]["input"], items[2]["caller"]) == (SCRIPT, {"type": "direct"})


async def test_a_choice_may_be_a_custom_tool(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    tools: Any = [{"type": "custom", **TOOL}, {"type": "function", "name": "now", "parameters": {}, "strict": None}]
    ring.behave = saying(CALL)
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "python"}]}
    for choice in ({"type": "custom", "name": "python"}, allowed):
        answer = await client.responses.create(model=MODEL, input="x", tools=tools, tool_choice=choice)  # type: ignore[arg-type]
        assert answer.output[0].type == "custom_tool_call"
        grammar = ring.requests[-1].grammar
        assert '\\"name\\": \\"python\\"' in grammar.text
        assert "now" not in grammar.text


async def test_what_a_function_returns_is_shown_to_the_model(client: openai.AsyncOpenAI, ring: FakeRing) -> None:
    schema = {"type": "object", "properties": {"degrees": {"type": "number"}}}
    tools: Any = [{"type": "function", "name": "weather", "parameters": {}, "strict": None, "output_schema": schema}]
    await client.responses.create(model=MODEL, input="x", tools=tools)
    assert json.dumps(schema) in bytes(ring.requests[-1].prompt).decode("latin-1")
