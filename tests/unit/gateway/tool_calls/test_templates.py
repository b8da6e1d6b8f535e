"""Conversations with calls, rendered by each family's kind of template; and by those that know no tools."""

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter, convert
from services.gateway.intake.prompts.chat import ChatPlan, plan_of
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.chat_template import ChatTemplate, traits_of
from services.gateway.tool_calls.families import FAMILIES, PARSER_NAMES, REASONING_NAMES
from services.gateway.tool_calls.parser import Parser
from shared.messages import ModelCard
from shared.models import REASONING_PARSERS, TOOL_PARSERS
from tests.unit.gateway.tool_calls.templates import (
    FEATURES,
    GEMMA2,
    GLM45,
    HARMONY,
    HUNYUAN,
    KIMI_K2,
    LFM2,
    LLAMA31,
    OF_FAMILY,
    QWEN3,
    SMOLLM2,
)
from tests.unit.gateway.tool_calls.texts import calls_of

CARD = ModelCard("m", 100, 256, [0], "", 0)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 2}'},
}
OTHER = {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "22 degrees"},
]
TWICE = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_1", "content": "22 degrees"},
]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def planned(source: str, card: ModelCard = CARD, **fields: object) -> tuple[ChatPlan, str]:
    """The plan for a request and its rendered prompt."""
    body = {"model": "m", "messages": CONVERSATION, "tools": TOOLS} | fields
    request = convert({name: value for name, value in body.items() if value is not None}, ChatCompletionRequest)
    template = template_of(source)
    plan = plan_of(request, card, traits_of(template))
    return plan, template.render(plan.messages, plan.tools, plan.options)


@pytest.mark.parametrize("family", sorted(OF_FAMILY))
def test_a_template_shows_tools_calls_and_results(family: str) -> None:
    plan, prompt = planned(OF_FAMILY[family])
    assert plan.family == family
    for word in ("Be kind.", "get_weather", "city", "Rome", "22 degrees"):
        assert word in prompt, word


@pytest.mark.parametrize("family", sorted(OF_FAMILY))
def test_the_familys_parser_reads_what_its_template_writes(family: str) -> None:
    """What the prompt shows of an earlier call is found again as that call."""
    plan, _ = planned(OF_FAMILY[family], tools=TOOLS[:1])
    without_tools = template_of(OF_FAMILY[family]).render(plan.messages, None, None)
    parsing = plan.parsing(without_tools)
    begin = {"llama3_json": '{"name"', "deepseek": "<Assistant>", "seed_oss": "<seed:bos>assistant"}.get(family, "")
    text = without_tools[without_tools.index(begin) :].removeprefix("<Assistant>")
    parser = Parser(FAMILIES[family].machine, parsing.types)
    ((name, arguments),) = calls_of([*parser.feed(text.replace('{"city": ', '{"city": ')), *parser.finish()])
    assert name == "get_weather"
    assert msgspec.json.decode(arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("family", sorted(set(OF_FAMILY) - {"pythonic"}))
def test_two_calls_at_once(family: str) -> None:
    _, prompt = planned(OF_FAMILY[family], messages=TWICE)
    for word in ("get_weather", "now", "Rome", "22 degrees", "noon"):
        assert word in prompt


@pytest.mark.parametrize(
    ("source", "first", "second"),
    [(LLAMA31, '"name": "get_weather"', '"name": "now"'), (HARMONY, "to=functions.get_weather", "to=functions.now")],
)
def test_a_template_of_single_calls_gets_them_one_by_one_with_their_results(
    source: str, first: str, second: str
) -> None:
    _, prompt = planned(source, messages=TWICE)
    places = [prompt.rindex(word) for word in (first, "22 degrees", second, "noon")]
    assert places == sorted(places)


def test_kimi_reads_names_in_ids() -> None:
    _, prompt = planned(KIMI_K2, messages=[*TWICE, CONVERSATION[1], *TWICE[1:]])
    for number, name in enumerate(("get_weather", "now")):
        assert f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>" in prompt
        assert f"## Return of functions.{name}:{number}\n" in prompt
    assert "call_1" not in prompt


def test_a_hunyuans_suffix_is_read_from_its_template() -> None:
    plan, prompt = planned(HUNYUAN, messages=CONVERSATION[:2])
    assert (plan.variant, plan.reasoning) == (":6124c78e", "hy_v3")
    parsing = plan.parsing(prompt)
    assert parsing.opened


def test_gpt_oss_takes_content_or_thoughts_before_a_call() -> None:
    said = {**CONVERSATION[2], "content": "I look.", "reasoning_content": "Hm."}
    _, prompt = planned(HARMONY, messages=[*CONVERSATION[:2], said, CONVERSATION[3]])
    assert "<|channel|>analysis<|message|>I look.<|end|>" in prompt
    _, prompt = planned(HARMONY, messages=[*CONVERSATION[:2], said | {"content": None}, CONVERSATION[3]])
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in prompt


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (LFM2, '<|tool_call_start|>[get_weather(city="Rome", days=2)]<|tool_call_end|>'),
        (
            LFM2.replace("<|tool_list_start|>", "<|tool_call|>"),
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
        ),
    ],
)
def test_a_template_that_shows_tools_alone_gets_calls_in_its_familys_words(source: str, call: str) -> None:
    plan, prompt = planned(source)
    assert plan.tools is not None
    assert f"assistant\n{call}<|im_end|>" in prompt
    assert "<|im_start|>tool\n<|tool_response_start|>22 degrees<|tool_response_end|>" in prompt
    parser = Parser(FAMILIES[plan.family].machine, {"get_weather": {"city": "string"}})
    ((name, arguments),) = calls_of([*parser.feed(call), *parser.finish()])
    assert (name, msgspec.json.decode(arguments)) == ("get_weather", {"city": "Rome", "days": 2})


@pytest.mark.parametrize("name", [*sorted(OF_FAMILY), "lfm2", "smollm2", "gemma2", "features"])
@pytest.mark.parametrize("thinking", [False, True])
def test_as_transformers_renders_it(name: str, thinking: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    source = {"lfm2": LFM2, "smollm2": SMOLLM2, "gemma2": GEMMA2, "features": FEATURES, **OF_FAMILY}[name]
    said = {**CONVERSATION[2], "reasoning_content": "Hm."}
    messages = [*CONVERSATION[:2], said, CONVERSATION[3], {"role": "user", "content": "More?"}]
    if name == "gemma2":
        messages = messages[1:]
    plan, ours = planned(source, messages=messages, chat_template_kwargs={"enable_thinking": thinking})
    theirs, _ = render_jinja_template(
        [plan.messages],
        tools=plan.tools,
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        **plan.options.variables,
    )
    assert ours == theirs[0]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_of_a_developer_are_the_systems(role: str) -> None:
    messages = [{"role": role, "content": "Be kind."}, CONVERSATION[1]]
    for source in OF_FAMILY.values():
        plan, prompt = planned(source, messages=messages, tools=None)
        assert plan.messages[0]["role"] == "system"
        assert "Be kind." in prompt


@pytest.mark.parametrize("source", [SMOLLM2, GEMMA2])
def test_a_template_without_tools_gets_them_in_words(source: str) -> None:
    conversation = CONVERSATION[1:] if source == GEMMA2 else CONVERSATION
    plan, prompt = planned(source, messages=conversation)
    assert plan.family == "hermes"
    assert plan.tools is None
    assert '{"type": "function", "function": {"name": "get_weather", "description": "The weather"' in prompt
    assert '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>' in prompt
    assert "<tool_response>\n22 degrees\n</tool_response>" in prompt
    assert "tool\n22" not in prompt


def test_words_of_the_user_follow_results_in_one_turn() -> None:
    _, prompt = planned(GEMMA2, messages=[*CONVERSATION[1:], {"role": "user", "content": "And then?"}])
    assert "</tool_response>\nAnd then?" in prompt


def test_without_a_system_message_one_is_made() -> None:
    plan, _ = planned(SMOLLM2, messages=CONVERSATION[1:2])
    assert [message["role"] for message in plan.messages] == ["system", "user"]


def test_old_functions_are_tools() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "get_weather", "content": "22 degrees"},
    ]
    functions = [tool["function"] for tool in TOOLS]
    plan, prompt = planned(QWEN3, tools=None, functions=functions, messages=messages)
    assert plan.asked.legacy
    assert "Rome" in prompt
    assert "<tool_response>\n22 degrees" in prompt


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    broken = {**CALL, "function": {"name": "now", "arguments": '{"a": '}}
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": "", "tool_calls": [broken]}, CONVERSATION[3]]
    _, prompt = planned(QWEN3, messages=messages)
    assert '"arguments": {"a": }' in prompt


def test_tool_choice_none_shows_no_tools() -> None:
    for source in (QWEN3, SMOLLM2):
        plan, prompt = planned(source, messages=CONVERSATION[:2], tool_choice="none")
        assert "get_weather" not in prompt
        assert plan.family == ""


def test_an_operators_choice_goes_first() -> None:
    plan, prompt = planned(QWEN3, msgspec.structs.replace(CARD, tool_parser="mistral"))
    assert plan.family == "mistral"
    assert "get_weather" in prompt
    with pytest.raises(InvalidParameter, match="turned off"):
        planned(QWEN3, msgspec.structs.replace(CARD, tool_parser="none"))


def test_the_registry_is_what_can_be_chosen() -> None:
    assert set(TOOL_PARSERS) - {"auto", "none"} == PARSER_NAMES
    assert set(REASONING_PARSERS) - {"auto", "none"} == REASONING_NAMES


def test_names_of_vllm_mean_the_same_notation() -> None:
    plan, _ = planned(QWEN3, msgspec.structs.replace(CARD, tool_parser="glm47", reasoning_parser="deepseek_r1"))
    assert (plan.family, plan.reasoning) == ("glm4", "think")


# --- reasoning -----------------------------------------------------------------------------------


def test_reasoning_is_found_where_the_template_knows_it() -> None:
    plan, prompt = planned(QWEN3)
    parsing = plan.parsing(prompt)
    assert (parsing.reasoning, parsing.opened) == ("think", False)
    plan, prompt = planned(OF_FAMILY["deepseek"], messages=CONVERSATION[:2], tools=None)
    parsing = plan.parsing(prompt)
    assert (parsing.tools, parsing.reasoning, parsing.opened) == ("", "think", True)
    plan, prompt = planned(QWEN3, msgspec.structs.replace(CARD, reasoning_parser="none"), tools=None)
    assert plan.parsing(prompt) is None


def test_identity_leaves_the_reasoning_in_the_content() -> None:
    plan, prompt = planned(
        OF_FAMILY["deepseek"], msgspec.structs.replace(CARD, reasoning_parser="identity"), tools=None
    )
    assert plan.parsing(prompt) is None


def test_what_the_model_thought_goes_to_the_template() -> None:
    thinking = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    _, prompt = planned(QWEN3, messages=[*CONVERSATION[:2], thinking, CONVERSATION[1]])
    assert "<think>\nHm.\n</think>" in prompt


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_reasoning_is_turned_off(fields: dict[str, object]) -> None:
    for source in (QWEN3, GLM45):
        _, prompt = planned(source, **fields)
        assert prompt.rstrip().endswith("</think>")
    _, prompt = planned(QWEN3, reasoning_effort="high")
    assert not prompt.rstrip().endswith("</think>")


def test_reasoning_effort_is_nothing_to_a_template_without_a_switch_for_it() -> None:
    assert planned(SMOLLM2, reasoning_effort="low")[1] == planned(SMOLLM2)[1]


def test_reasoning_effort_itself() -> None:
    _, prompt = planned("{{ messages[0].content }} effort {{ reasoning_effort }}", reasoning_effort="low", tools=None)
    assert prompt == "Be kind. effort low"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "unsupported_parameter"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
    ],
)
def test_what_a_template_does_not_know_is_refused(fields: dict[str, object], param: str, reason: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        planned(SMOLLM2, **fields)
    assert (caught.value.param, caught.value.reason) == (param, reason)
