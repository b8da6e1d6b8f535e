"""Reasoning of responses: summaries, whose turns' a model sees again, and the padding of deltas."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, stub_card
from tests.integration.gateway.responding import RESPONSES

THINKING = "org/thinking"
THOUGHTS = "First this. And why.\n\nThen that. And how."
SUMMARIES: dict[str, list[str]] = {
    "concise": ["First this.", "Then that."],
    "detailed": ["First this. And why.", "Then that. And how."],
}


@pytest.mark.parametrize("summary", SUMMARIES)
async def test_a_summary_is_an_extract(client: openai.AsyncOpenAI, ring: FakeRing, summary: Any) -> None:
    await ring.add_model(stub_card(THINKING, reasoning_parser="think"))
    ring.behave = saying(f"<think>{THOUGHTS}</think>Done.")
    stream = await client.responses.create(model=THINKING, input="x", stream=True, reasoning={"summary": summary})
    events: list[Any] = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    parts = ["reasoning_summary_part.added", "reasoning_summary_text.done", "reasoning_summary_part.done"]
    assert [kind for kind in kinds if kind in parts] == parts * 2
    said = ["", ""]
    for event in events:
        if event.type == "response.reasoning_summary_text.delta":
            said[event.summary_index] += event.delta
    assert said == SUMMARIES[summary]
    thought, message = events[-1].response.output
    assert [part.text for part in thought.summary] == said
    assert thought.content[0].text == THOUGHTS
    assert message.content[0].text == "Done."
    assert events[-1].response.reasoning.summary == summary
    whole = await client.responses.retrieve(events[-1].response.id)
    assert whole.output[0] == thought


async def test_what_an_answer_was_is_listed_again(client: openai.AsyncOpenAI) -> None:
    given: Any = [{"role": "assistant", "content": "b", "phase": "final_answer"}, {"role": "user", "content": "c"}]
    response = await client.responses.create(model=MODEL, input=given, reasoning={"context": "all_turns"})
    items = (await client.responses.input_items.list(response.id, order="asc")).model_dump(exclude_none=True)
    assert items["data"][0]["phase"] == "final_answer"
    assert response.reasoning.model_dump()["context"] == "all_turns"


async def test_deltas_are_padded_where_that_is_asked(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": "Hi", "stream": True}
    asked = await http.post(RESPONSES, json=body | {"stream_options": {"include_obfuscation": True}})
    plain = await http.post(RESPONSES, json=body)
    identity = _events(plain)[0]["response"]["id"]
    again = await http.get(f"{RESPONSES}/{identity}?stream=true&include_obfuscation=true")
    for answer, padded in ((asked, True), (plain, False), (again, True)):
        for event in _events(answer):
            assert ("obfuscation" in event) == (padded and event["type"].endswith(".delta"))


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
