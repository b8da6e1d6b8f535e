"""What the Responses API refuses, and how it says so."""

from typing import Any

import httpx
import openai

from tests.integration.gateway.fake_ring import MODEL
from tests.integration.gateway.responding import RESPONSES

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"conversation": "conv_1"}, "conversation", "conversation_not_found"),
    ({"conversation": {"id": "conv_" + "0" * 32}}, "conversation", "conversation_not_found"),
    ({"conversation": "conv_1", "store": False}, "store", "invalid_value"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation", "invalid_value"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
    ({"context_management": [{"type": "other"}]}, "context_management[0].type", "invalid_value"),
    (
        {"context_management": [{"type": "compaction", "compact_threshold": 0}]},
        "context_management[0].compact_threshold",
        "integer_below_min_value",
    ),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content", "invalid_value"),
    ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
    ({"include": ["anything"]}, "include", "unsupported_parameter"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
    ({"reasoning": {"context": "none"}}, "reasoning.context", "invalid_value"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "invalid_value"),
    ({"store": False, "background": True}, "store", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "string_above_max_length"),
    ({"metadata": {str(n): "v" for n in range(17)}}, "metadata", "object_above_max_properties"),
    ({"input": []}, "input", "empty_array"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty_array"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "invalid_value"),
    ({"input": [{"role": "assistant", "content": "x", "phase": "analysis"}]}, "input[0].phase", "invalid_value"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "filename": "a.txt"}]}]},
        "input[0].content[0].file_data",
        "missing_required_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://a.invalid"}]}]},
        "input[0].content[0].file_url",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-0"}]}]},
        "input",
        "file_not_found",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "JVBERi0xLjcK/w=="}]}]},
        "input",
        "unsupported_file",
    ),
    (
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", "created_by": "n"}]},
        "input[0].created_by",
        "unsupported_parameter",
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", "missing_required_parameter"),
    (
        {
            "tools": [
                {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
            ]
        },
        "tools[0].format.syntax",
        "unsupported_parameter",
    ),
    (
        {
            "tools": [
                {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "("}}
            ]
        },
        "tools[0].format",
        "invalid_grammar",
    ),
    ({"input": ["x"]}, "input[0]", "invalid_type"),
    ({"input": 5}, "input", "invalid_type"),
    ({"previous_response_id": "nonsense"}, "previous_response_id", "previous_response_not_found"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_parameter"),
    ({"request_id": "with space"}, "request_id", "invalid_value"),
    ({"nonsense": 1}, "nonsense", "unknown_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x y", "schema": {}}}}, "text.format.name", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing_required_parameter"),
    (
        {"tools": [{"type": "web_search"}, {"type": "function", "name": "f", "async": True}]},
        "tools[1].async",
        "unsupported_parameter",
    ),
    ({"tools": [{"type": "function", "name": "f", "nonsense": 1}]}, "tools[0].nonsense", "unknown_parameter"),
    (
        {
            "tools": [{"type": "function", "name": "f", "defer_loading": False, "allowed_callers": ["direct"]}],
            "tool_choice": {"type": "custom", "name": "f"},
        },
        "tool_choice.name",
        "invalid_value",
    ),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "empty_string"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"reasoning": {"effort": "highest"}}, "reasoning.effort", "invalid_value"),
    ({"seed": 2**64}, "seed", "integer_above_max_value"),
    ({"stop": [""]}, "stop", "empty_string"),
]


async def test_what_is_refused_says_why(http: httpx.AsyncClient) -> None:
    for changes, param, code in REFUSED:
        answer = await http.post(RESPONSES, json={"model": MODEL, "input": "Hi"} | changes)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), changes
        assert error["type"] == "invalid_request_error"


async def test_what_agents_say_of_themselves_is_ignored_and_named(http: httpx.AsyncClient) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "defer_loading": True}]
    body = {"model": MODEL, "input": "Hi", "client_metadata": {"thread": "1"}, "tools": tools}
    answer = await http.post(RESPONSES, json=body)
    assert answer.status_code == 200
    named = "client_metadata, tools[0].web_search, tools[1].defer_loading"
    assert answer.headers["x-ryzanstein-ignored-fields"] == named
    assert [tool["type"] for tool in answer.json()["tools"]] == ["web_search", "function"]


STRANGE: list[tuple[str, int, str]] = [
    ("/resp_1", 404, "response_not_found"),
    ("/chatcmpl-" + "0" * 32, 404, "response_not_found"),
    ("/resp_" + "0" * 32, 404, "response_not_found"),
    ("/{id}?include[]=nonsense", 400, "unsupported_parameter"),
    ("/{id}?stream=perhaps", 400, "invalid_type"),
    ("/{id}?stream=true&starting_after=x", 400, "invalid_type"),
    ("/{id}?stream=true&starting_after=99", 400, "invalid_position"),
    ("/{id}?stream=true&starting_after=-1", 400, "integer_below_min_value"),
    ("/{id}?starting_after=1", 400, "invalid_value"),
    ("/{id}?nonsense=1", 400, "unknown_parameter"),
    ("/{id}/input_items?limit=0", 400, "integer_below_min_value"),
    ("/{id}/input_items?limit=101", 400, "integer_above_max_value"),
    ("/{id}/input_items?order=up", 400, "invalid_value"),
    ("/{id}/input_items?after=msg_1", 400, "invalid_value"),
    ("/{id}/output_items", 404, "unknown_url"),
]


async def test_strange_questions_about_a_response(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    made = await client.responses.create(model=MODEL, input="Hi")
    for path, wanted, code in STRANGE:
        answer = await http.get(RESPONSES + path.replace("{id}", made.id))
        assert (answer.status_code, answer.json()["error"]["code"]) == (wanted, code), path
