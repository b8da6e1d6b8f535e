"""Tool calls through the whole house: a small model makes them because the grammar lets nothing else through."""

import json
from typing import Any

import openai
import pydantic
import pytest

from shared.model_store.catalog import DEFAULT_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris for the next two days?"}]


class GetWeather(pydantic.BaseModel):
    """The weather of some days."""

    city: str = pydantic.Field(max_length=30)
    days: int = pydantic.Field(ge=1, le=7)


class Now(pydantic.BaseModel):
    """The time."""


TOOLS: Any = [
    openai.pydantic_function_tool(GetWeather, name="get_weather"),
    openai.pydantic_function_tool(Now, name="now"),
]


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_a_small_model_calls_what_is_demanded(client: openai.OpenAI, choice: Any, finish: str) -> None:
    with client.chat.completions.stream(
        model=DEFAULT_MODEL,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather if call.function.name == "get_weather" else Now)
    assert final.choices[0].finish_reason == finish
    assert final.choices[0].message.content is None


def test_the_result_goes_back(client: openai.OpenAI) -> None:
    """The template of this model knows no tools: they, the call and its result are put into words."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})},
    }
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "It rains in Paris."},
    ]
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=40
    )
    assert "rain" in (answer.choices[0].message.content or "").lower()
    assert answer.choices[0].finish_reason in ("stop", "length")
