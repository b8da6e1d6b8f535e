"""Responses of the real model, with the client that users have."""

import time
from typing import Any

import pytest

from services.cli.models import DEFAULT_MODEL
from tests.e2e.stack import Stack
from tests.e2e.test_real_model import Connect, answer, connect

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

__all__ = ["connect"]

QUESTION = "What is the capital of France? Answer in one sentence."
STORY = "Write a long story about a lighthouse."


def test_a_response_says_what_a_chat_completion_says(connect: Connect, two_groups: Stack) -> None:
    client = connect(two_groups)
    made = client.responses.create(model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32)
    assert made.output_text == answer(client, QUESTION)
    with client.responses.stream(
        model=DEFAULT_MODEL, input=QUESTION, temperature=0, max_output_tokens=32
    ) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_text == made.output_text
    assert "Paris" in made.output_text
    assert made.usage is not None
    counted = client.responses.input_tokens.count(model=DEFAULT_MODEL, input=QUESTION)
    assert counted.input_tokens == made.usage.input_tokens


def test_a_conversation_is_the_one_that_a_client_would_send(connect: Connect, two_groups: Stack) -> None:
    client = connect(two_groups)
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
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_background_response_is_read_from_any_event(connect: Connect, two_groups: Stack) -> None:
    """Speculation brings several tokens at a time: the events are the same whoever reads them when."""
    client = connect(two_groups)
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
