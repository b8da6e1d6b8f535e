"""What is computed ahead is what the conversation's next prompt begins with, whatever the user says."""

from typing import Any

import msgspec
import pytest

from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.prompts.prefill import next_prompt, without_answer
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.chat_template import ChatTemplate, traits_of
from services.gateway.tokenizer.templates import TemplateOptions
from services.gateway.tokenizer.tokenizer import Rendered
from shared.errors import ContextLengthExceeded
from shared.messages import ModelCard
from tests.unit.gateway.tool_calls.templates import GEMMA2, LLAMA31, QWEN3
from tests.unit.gateway.tool_calls.test_templates import TOOLS, template_of

CARD = ModelCard("m", 4000, 256, [0], "", 0)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nWho is it?\n</think>\n\nHello!"}]


class Bytes:
    """A tokenizer of bytes."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.traits = traits_of(template)

    async def render_chat(self, messages: Any, tools: Any, options: TemplateOptions) -> Rendered:
        return Rendered([self._template.render(messages, tools, options)])

    async def encode_rendered(self, rendered: Rendered) -> list[int]:
        return list(rendered.text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text)


def request_of(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"model": "m", "messages": messages} | fields, ChatCompletionRequest)


async def ahead_of(source: str, messages: list[dict[str, Any]], most: int = 0, **fields: Any) -> str:
    request = without_answer(request_of(messages, **fields))
    tokens = await next_prompt(request, CARD, Bytes(template_of(source)), most)  # type: ignore[arg-type]
    return bytes(tokens).decode()


def prompt(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Of a request that wants an answer."""
    template = template_of(source)
    plan = plan_of(request_of(messages, **fields), CARD, traits_of(template))
    return template.render(plan.messages, plan.tools, plan.options)


@pytest.mark.parametrize("source", [QWEN3, LLAMA31, GEMMA2], ids=["qwen3", "llama31", "gemma2"])
@pytest.mark.parametrize("said", ["And you?", "", "éa", "1"])
async def test_every_next_turn_begins_with_it(source: str, said: str) -> None:
    tools = {} if source == GEMMA2 else {"tools": TOOLS}
    found = await ahead_of(source, TALK, **tools)
    assert prompt(source, [*TALK, {"role": "user", "content": said}], **tools).startswith(found)
    assert "Hello!" in found
    assert found.rstrip().endswith(("user", "user<|end_header_id|>")), "up to where the user speaks"


async def test_thoughts_that_the_next_prompt_leaves_out_are_not_computed() -> None:
    """Templates show the reasoning of the last turn alone."""
    source = (
        "{% for message in messages %}<{{ message.role }}>{% if loop.last %}{{ message.content }}"
        "{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
    )
    assert "Who is it?" in prompt(source, TALK)
    assert await ahead_of(source, TALK) == "<user>Hi<assistant>\n\nHello!<user>"


async def test_what_the_user_has_said_already_is_computed_without_the_models_turn() -> None:
    found = await ahead_of(QWEN3, TALK[:1])
    assert found.endswith("Hi<|im_end|>\n")
    assert prompt(QWEN3, TALK[:1]).startswith(found)


async def test_a_template_that_takes_no_such_turn_gets_the_conversation_alone() -> None:
    """This one wants the user first, and a system message nowhere."""
    source = "{% if messages|length > 2 %}{{ raise_exception('full') }}{% endif %}{{ messages[0]['content'] }}"
    assert await ahead_of(source, TALK) == "Hi"


async def test_what_concerns_the_answer_alone_changes_nothing() -> None:
    plain = await ahead_of(QWEN3, TALK, tools=TOOLS)
    answer = {
        "n": 3,
        "stream": True,
        "max_completion_tokens": 50,
        "stop": ["x"],
        "logprobs": True,
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "add_generation_prompt": True,
    }
    assert await ahead_of(QWEN3, TALK, tools=TOOLS, **answer) == plain
    request = without_answer(request_of(TALK, **answer))
    assert (request.max_tokens, request.n, request.stream, request.tool_choice) == (1, None, None, None)
    hidden = without_answer(request_of(TALK, tools=TOOLS, tool_choice="none"))
    assert hidden.tool_choice == "none"


async def test_what_is_too_long_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(ContextLengthExceeded, match="takes prompts of at most 20 tokens"):
        await ahead_of(QWEN3, TALK, most=20)
