"""What one request brings is bounded field by field, before it costs anything, and the refusal names the limit."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.openapi.document import constrain
from services.gateway.core.errors import InvalidParameter, convert
from services.gateway.intake.sampling.params import predicted as tokens_of_prediction
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.validation import check_chat, marked
from services.gateway.streams.formats import PredictionTally
from services.gateway.tokenizer.tokenizer import StubTokenizer
from shared import limits
from shared.errors import ContextLengthExceeded
from shared.limits import Limit
from shared.messages import ModelCard

CARD = ModelCard("m", 64, 256, [], "", 0)


def check(**fields: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    check_chat(convert(body, ChatCompletionRequest))


def message(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "a"} | fields


def calling(count: int) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": str(at), "type": "function", "function": function} for at in range(count)]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in calls]
    return [{"role": "assistant", "tool_calls": calls}, *answers[: limits.MESSAGES.value - 1]]


PART = {"type": "text", "text": "a"}
CASES: list[tuple[Limit, str, Any]] = [
    (limits.STOP_STRINGS, "stop", lambda count: ["a"] * count),
    (limits.STOP_CHARACTERS, "stop", lambda count: "a" * count),
    (limits.STOP_CHARACTERS, "stop", lambda count: ["a", "a" * count]),
    (limits.STOP_TOKENS, "stop_token_ids", lambda count: [3] * count),
    (limits.LOGIT_BIASES, "logit_bias", lambda count: dict.fromkeys(range(count), 1)),
    (limits.ALLOWED_TOKENS, "allowed_token_ids", lambda count: [3] * count),
    (limits.BAD_WORDS, "bad_words", lambda count: ["a"] * count),
    (limits.BAD_WORD_CHARACTERS, "bad_words", lambda count: ["a" * count]),
    (limits.USER_CHARACTERS, "user", lambda count: "a" * count),
    (limits.USER_CHARACTERS, "safety_identifier", lambda count: "a" * count),
    (limits.METADATA_ENTRIES, "metadata", lambda count: {str(at): "v" for at in range(count)}),
    (limits.METADATA_KEY, "metadata", lambda count: {"k" * count: "v"}),
    (limits.METADATA_VALUE, "metadata", lambda count: {"k": "v" * count}),
    (limits.MESSAGES, "messages", lambda count: [message()] * count),
    (limits.PARTS, "messages", lambda count: [message(content=[PART] * (count - 9)), message(content=[PART] * 9)]),
]


@pytest.mark.parametrize(("limit", "name", "made"), CASES, ids=lambda value: getattr(value, "name", None))
def test_so_much_is_taken_and_no_more(limit: Limit, name: str, made: Any) -> None:
    check(**{name: made(limit.value)})
    with pytest.raises(InvalidParameter) as caught:
        check(**{name: made(limit.value + 1)})
    assert limit.cited() in caught.value.message
    assert str(limit.value + 1) in caught.value.message
    assert (caught.value.param or "").partition(".")[0] == name


def test_calls_of_all_messages_are_counted() -> None:
    with pytest.raises(InvalidParameter, match="limit calls: 4,096"):
        check(messages=calling(limits.CALLS.value + 1))


# Fields whose bound no JSON Schema can say, and what it is.
BOUNDED_ELSEWHERE = {
    "model": "compared with those that are served",
    "prompt_cache_key": "only its hash is kept",
    "prompt": "the context, by its size before it is tokenized",
    "prediction": "the context, by its size before it is tokenized",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar"), "size of a grammar"),
    **dict.fromkeys(("structured_outputs", "response_format"), "size of a grammar"),
    **dict.fromkeys(("tool_choice", "function_call", "reasoning_effort"), "compared with what there is"),
    "chat_template_kwargs": "the template's limits",
    **dict.fromkeys(marked(ChatCompletionRequest, "ignored"), "nothing reads them"),
    "stream_options": "three booleans",
}


def bounded(schema: dict[str, Any]) -> bool:
    """Whether every branch of `schema` that can be large has a bound."""
    if "enum" in schema or "const" in schema:
        return True
    if "anyOf" in schema:
        return all(map(bounded, schema["anyOf"]))
    keyword = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}.get(schema.get("type", ""))
    return keyword is None or keyword in schema


def test_every_field_that_can_be_large_has_a_bound() -> None:
    _, components = msgspec.json.schema_components([ChatCompletionRequest, CompletionRequest], ref_template="{name}")
    constrain(components)
    for kind in ("ChatCompletionRequest", "CompletionRequest"):
        unbounded = {name for name, schema in components[kind]["properties"].items() if not bounded(schema)}
        assert unbounded <= set(BOUNDED_ELSEWHERE), f"bound {unbounded - set(BOUNDED_ELSEWHERE)} of {kind}"


class Counting(StubTokenizer):
    """Says how often it was asked to tokenize."""

    asked = 0

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.asked += 1
        return await super().encode(text, special=special)

    def fewest_tokens(self, text: str) -> int:
        return len(text) // 4


async def predicted(length: int, tokenizer: StubTokenizer) -> int:
    prediction = {"type": "content", "content": "a" * length}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "prediction": prediction}
    request = msgspec.convert(body, ChatCompletionRequest)
    return len(await tokens_of_prediction(request, CARD, tokenizer))


async def test_a_prediction_has_no_more_tokens_than_the_context() -> None:
    assert await predicted(CARD.context_length, Counting()) == CARD.context_length
    with pytest.raises(ContextLengthExceeded, match="limit prediction: 64 tokens") as caught:
        await predicted(CARD.context_length + 1, Counting())
    assert caught.value.param == "prediction"


async def test_a_prediction_that_cannot_fit_is_not_tokenized() -> None:
    tokenizer = Counting()
    with pytest.raises(ContextLengthExceeded, match="limit prediction"):
        await predicted(4 * (CARD.context_length + 1), tokenizer)
    assert not tokenizer.asked


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)), st.lists(st.integers(0, 9)))
def test_tokens_that_came_of_a_prediction(expected: list[int], output: list[int], steps: list[int]) -> None:
    tally, read = PredictionTally(Counter(expected)), 0
    for step in [*steps, len(output)]:
        read = min(read + step, len(output))
        assert tally.came(output, read) == (Counter(expected) & Counter(output[:read])).total()
