"""Responses of the real model, with the client that users have."""

import time
from typing import Any

import httpx
import openai
import pydantic
import pytest

from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.test_real_model import answer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION = "What is the capital of France? Answer in one sentence."
STORY = "Write a long story about a lighthouse."


def test_a_response_says_what_a_chat_completion_says(client: openai.OpenAI) -> None:
    made = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32)
    assert made.output_text == answer(client, QUESTION)
    with client.responses.stream(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_text == made.output_text
    assert "Paris" in made.output_text
    counted = client.responses.input_tokens.count(model=DEFAULT_MODEL, input=QUESTION)
    assert counted.input_tokens == made.usage.input_tokens


def test_a_conversation_is_the_one_that_a_client_would_send(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input=QUESTION, **options)
    second = client.responses.create(input="And of Italy?", previous_response_id=first.id, **options)
    reply = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And of Italy?"},
        ],
        temperature=0,
        max_tokens=24,
    )
    assert second.output_text == reply.choices[0].message.content
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_prompt_is_computed_before_it_is_asked(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_output_tokens": 16}
    question = "Name the seven days of the week, " * 8
    cold = client.responses.create(input=question, prompt_cache_options={"prewarm": True}, **options)
    warm = client.responses.create(input=question, **options)
    assert cold.output == []
    assert cold.usage.input_tokens_details.cached_tokens < warm.usage.input_tokens_details.cached_tokens
    assert warm.output_text


def test_a_sessions_next_turn_is_computed_ahead(client: openai.OpenAI) -> None:
    talk: Any = [
        {"role": "user", "content": "Name the months of the year, " * 8},
        {"role": "assistant", "content": "January, February, March and so on. " * 8},
    ]
    body = {"model": DEFAULT_MODEL, "messages": talk}
    first, again = (client.post("/sessions/months/prefill", cast_to=httpx.Response, body=body).json() for _ in range(2))
    assert (first["status"], again["status"]) == ("completed", "completed")
    assert first["computed_tokens"] > again["computed_tokens"]
    assert again["computed_tokens"] <= 16, "a block at most"
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[*talk, {"role": "user", "content": "And the last one?"}],
        max_completion_tokens=4,
        temperature=0,
        extra_headers={"X-Session-ID": "months"},
    )
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first["prompt_tokens"] // 16 * 16


def test_a_background_response_is_read_from_any_event(client: openai.OpenAI) -> None:
    """Speculation brings several tokens at a time: the events are the same whoever reads them when."""
    job = client.responses.create(
        model=DEFAULT_MODEL, input=STORY, temperature=0, max_output_tokens=60, background=True
    )
    assert job.status == "queued"
    begun = []
    with client.responses.retrieve(job.id, stream=True) as stream:
        for event in stream:
            begun.append(event)
            if len(begun) == 20:
                break
    rest = list(client.responses.retrieve(job.id, stream=True, starting_after=begun[-1].sequence_number))
    end = time.monotonic() + 60
    while (shown := client.responses.retrieve(job.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end, shown.status
    assert list(client.responses.retrieve(job.id, stream=True)) == begun + rest
    text = "".join(event.delta for event in begun + rest if event.type == "response.output_text.delta")
    assert text == shown.output_text == answer(client, STORY, max_tokens=60)
    assert shown.status == "incomplete"


@pytest.mark.nightly
def test_a_form_and_a_call_are_held_to(client: openai.OpenAI) -> None:
    class Animal(pydantic.BaseModel):
        name: str
        legs: int

    options: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0}
    made = client.responses.parse(input="Name an animal and its legs.", text_format=Animal, **options)
    assert isinstance(made.output_parsed, Animal)
    tool = openai.pydantic_function_tool(Animal, name="note")
    function = {"type": "function", **tool["function"]}
    for choice in ("required", {"type": "function", "name": "note"}):
        with client.responses.stream(
            input="Note that a cat has four legs.", tools=[function], tool_choice=choice, **options
        ) as stream:
            final = stream.until_done().get_final_response()
        (call,) = [item for item in final.output if item.type == "function_call"][:1]
        assert call.name == "note"
        Animal.model_validate_json(call.arguments)
        rest = client.responses.retrieve(final.id, stream=True, starting_after=6)
        numbers = [event.sequence_number for event in rest]
        assert numbers == list(range(7, 7 + len(numbers)))
        assert numbers
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "noted"}
        for item in final.output
        if item.type == "function_call"
    ]
    last = client.responses.create(
        input=outputs, previous_response_id=final.id, tools=[function], max_output_tokens=16, **options
    )
    assert last.usage.input_tokens > final.usage.input_tokens
