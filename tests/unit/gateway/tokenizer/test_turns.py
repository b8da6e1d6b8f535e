"""Which tokens of a conversation training takes a loss of: those that the model would have written when it served."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.errors import InvalidParameter, convert
from services.gateway.intake.fine_tuning.examples import conversation_of
from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.chat_template import ChatTemplate, traits_of
from services.gateway.tokenizer.encoding import Encoding
from services.gateway.tokenizer.templates import TemplateInput, TemplateOptions
from services.gateway.tokenizer.tokenizer import ModelTokenizer, StubTokenizer
from services.gateway.tokenizer.turns import TextSegment, TrainedText, turns_of, weights_of
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files
from tests.unit.gateway.tool_calls.templates import GEMMA2, GEMMA4, OF_FAMILY, SMOLLM2
from tests.unit.gateway.tool_calls.test_templates import CALL, CARD, CONVERSATION, TOOLS

START, END = 0, 1
ENCODING = Encoding()
TINY = ModelTokenizer(tiny_files(), None, ENCODING)
TEXTS = st.lists(
    st.sampled_from(["a", " ", "\n", "é", "<|end|>", "<|start|>assistant\n", "\U0001f600"]), max_size=6
).map("".join)
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "FIRST"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "SECOND"},
]
CALLS: list[dict[str, Any]] = [
    *CONVERSATION,
    {"role": "assistant", "content": "It is WARM."},
    {"role": "user", "content": "And tomorrow?"},
    {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_9"}]},
]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def learned(template: ChatTemplate, conversation: TemplateInput, trained: list[int]) -> list[tuple[str, str]]:
    """Each thing that is learned, behind its context."""
    return [
        (turns.text[:begin], turns.text[begin:end])
        for turns in turns_of(template, conversation, trained)
        for begin, end in turns.spans
    ]


@pytest.mark.parametrize("source", [GEMMA2, SMOLLM2, *OF_FAMILY.values()])
def test_every_answer_is_learned_once_behind_the_prompt_that_serving_sends(source: str) -> None:
    template = template_of(source)
    found = learned(template, TemplateInput(CHAT), [1, 3])
    prompts = [template.render(CHAT[:index]) for index in (1, 3)]
    assert [behind for behind, _ in found] == prompts
    assert [("FIRST" in said, "SECOND" in said) for _, said in found] == [(True, False), (False, True)]


@pytest.mark.parametrize("family", sorted(OF_FAMILY))
def test_calls_are_learned_as_the_family_writes_them(family: str) -> None:
    template = template_of(OF_FAMILY[family])
    traits = traits_of(template)
    request = convert({"model": "m", "messages": CALLS, "tools": TOOLS}, ChatCompletionRequest)
    conversation, trained = conversation_of(request, CARD, traits)
    found = learned(template, conversation, trained)
    said = [text for _, text in found]
    assert len(said) == 3
    assert "get_weather" in said[0]
    assert "Rome" in said[0]
    assert "WARM" in said[1]
    assert "get_weather" in said[2]
    before = convert({"model": "m", "messages": CALLS[:4], "tools": TOOLS}, ChatCompletionRequest)
    plan = plan_of(before, CARD, traits)
    assert found[1][0] == template.render(plan.messages, plan.tools, plan.options)


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<eot>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORCED = THINKING.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[A]{% generation %}{{ m.content }}#{% endgeneration %}"
    "{% else %}[U]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[ANSWER]{% endif %}"
)
SHIFTING = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
THOUGHT = [{**CHAT[1], "reasoning_content": "ONE"}, {**CHAT[3], "reasoning_content": "TWO"}]


def test_a_template_that_drops_earlier_thoughts_gives_each_answer_a_text_of_its_own() -> None:
    messages = [CHAT[0], THOUGHT[0], CHAT[2], THOUGHT[1]]
    found = turns_of(template_of(THINKING), TemplateInput(messages), [1, 3])
    assert [turns.text for turns in found] == [
        "<user>Hello<eot><assistant><think>ONE</think>FIRST<eot>",
        "<user>Hello<eot><assistant>FIRST<eot><user>And then?<eot><assistant><think>TWO</think>SECOND<eot>",
    ]
    assert [turns.text[begin:end] for turns in found for begin, end in turns.spans] == [
        "<think>ONE</think>FIRST<eot>",
        "<think>TWO</think>SECOND<eot>",
    ]


def test_an_answer_without_thoughts_ends_the_thought_that_the_prompt_begins() -> None:
    template = template_of(FORCED)
    prompt = template.render(CHAT[:1])
    assert prompt.endswith("<think>")
    assert learned(template, TemplateInput(CHAT[:2]), [1]) == [(prompt, "</think>FIRST<eot>")]
    assert learned(template, TemplateInput([CHAT[0], THOUGHT[0]]), [1]) == [(prompt, "ONE</think>FIRST<eot>")]
    template = template_of(FORCED.replace("loop.last", "false").replace("<think>{%", "<think>\n{%"))
    told = learned(template, TemplateInput([CHAT[0], THOUGHT[0]]), [1])
    assert told == [(f"{prompt}\n", "ONE\n</think>\n\nFIRST<eot>")], "also where the template never shows thoughts"


def test_what_a_prompt_has_and_the_text_has_not_is_told() -> None:
    template = template_of(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}#{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\nNow: {% endif %}"
    )
    (turns,) = turns_of(template, TemplateInput(CHAT), [3])
    assert turns.unlike_prompt == "\nNow: "
    assert [turns.text[begin:end] for begin, end in turns.spans] == ["SECOND#"]
    (turns,) = turns_of(template_of(GEMMA4), TemplateInput(CHAT[:2]), [1])
    assert not turns.unlike_prompt


def test_a_template_that_marks_the_answers_itself_is_believed_where_the_prompt_does_not_tell() -> None:
    (turns,) = turns_of(template_of(MARKED), TemplateInput(CHAT), [1, 3])
    assert turns.text == "[U]Hello[A]FIRST#[U]And then?[A]SECOND#"
    assert [turns.text[begin:end] for begin, end in turns.spans] == ["FIRST#", "SECOND#"]
    (turns,) = turns_of(template_of(MARKED), TemplateInput(CHAT), [3])
    assert [turns.text[begin:end] for begin, end in turns.spans] == ["SECOND#"]
    assert template_of(MARKED).render(CHAT) == "[U]Hello[A]FIRST#[U]And then?[A]SECOND#[ANSWER]"


def test_a_template_whose_history_depends_on_what_follows_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="cannot be told which text is the answer"):
        turns_of(template_of(SHIFTING), TemplateInput(CHAT), [3])


def of_tiny(messages: list[dict[str, str]], trained: list[int]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each text, and the positions of those that are trained."""

    async def encode() -> list[tuple[list[int], list[int]]]:
        texts = await TINY.render_turns(TemplateInput(messages), trained)
        found = await TINY.encode_trained(texts, END)
        return [(one.tokens, [index for index, weight in enumerate(one.weights) if weight]) for one in found]

    return asyncio.run(encode())


@given(contents=st.lists(TEXTS, min_size=2, max_size=6), skip=st.integers(0, 2))
def test_tokens_are_those_of_serving(contents: list[str], skip: int) -> None:
    """Whatever is written in them: behind the tokens of the prompt come those of the answer, up to its end."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]
    answers = [index for index in range(1, len(messages), 2) if index // 2 != skip] or [1]
    ((tokens, positions),) = of_tiny(messages, answers)

    async def served() -> list[int]:
        expected: list[int] = []
        for index in answers:
            prompt = await TINY.encode_rendered(await TINY.render_chat(messages[:index]))
            behind = await TINY.encode_rendered(
                await TINY.render_chat(messages[: index + 1], None, TemplateOptions(add_generation_prompt=False))
            )
            assert tokens[: len(behind)] == behind
            expected += range(len(prompt), len(behind) - 1)  # the template puts a line break behind each
        return expected

    assert positions == asyncio.run(served())
    assert tokens[positions[-1]] == END
    assert START not in [tokens[position] for position in positions]


def test_white_space_behind_the_end_of_a_turn_is_not_learned() -> None:
    files = tiny_files(template="{% for m in messages %}<|start|>{{ m.content }}<|end|>\n\n{% endfor %}")
    tokenizer = ModelTokenizer(files, None, ENCODING)

    async def encode() -> bytes:
        texts = await tokenizer.render_turns(TemplateInput(CHAT[:2]), [1])
        (found,) = await tokenizer.encode_trained(texts, END)
        assert found.tokens[-3] == END
        return found.weights

    assert asyncio.run(encode()).endswith(b"\1\1\0\0")


def test_a_text_without_an_end_gets_one() -> None:
    tokenizer = ModelTokenizer(tiny_files(template=None), None, ENCODING)

    async def encode(text: TrainedText) -> tuple[list[int], bytes]:
        (found,) = await tokenizer.encode_trained([text], END)
        return found.tokens, found.weights

    tokens, weights = asyncio.run(encode(TrainedText([TextSegment("2+2=4", [(4, 5)])], special=True)))
    assert (tokens[0], tokens[-1]) == (END, END)  # this tokenizer begins texts with that one
    assert weights == b"\0\0\0\0\0\1\1"
    tokens, weights = asyncio.run(encode(TrainedText([TextSegment("4<|end|>", [(0, 8)])])))
    assert weights == b"\1\1"
    tokens, weights = asyncio.run(encode(TrainedText([TextSegment("4", [(0, 1)])], special=True)))
    assert weights == b"\x00\x01\x01"
    with pytest.raises(InvalidParameter, match="'prompt' and 'completion'"):
        asyncio.run(tokenizer.render_turns(TemplateInput(CHAT), [1]))


def test_tokens_that_end_within_a_span_are_of_it() -> None:
    assert weights_of(5, [2, 2, 3, 5, 9].__getitem__, [(2, 5)]) == b"\x00\x00\x01\x01\x00"
    assert weights_of(0, [0].__getitem__, [(0, 4)]) == b""


def test_the_stub_learns_answers_too() -> None:
    async def encode() -> tuple[list[int], bytes]:
        stub = StubTokenizer()
        (found,) = await stub.encode_trained(await stub.render_turns(TemplateInput(CHAT), [1]), END)
        return found.tokens, found.weights

    tokens, weights = asyncio.run(encode())
    assert bytes(tokens) == b"Hello\nFIRST\n"
    assert weights == b"\0" * 6 + b"\1" * 6
