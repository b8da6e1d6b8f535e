"""Which grammar an answer must match, by its tools, its format and its reasoning together."""

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.sampling.structured_output import RequestedGrammar, demanded, schemas_of, wanted_by
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.tokenizer.chat_template import traits_of
from shared.messages import ModelCard
from tests.unit.gateway.tool_calls.templates import DEEPSEEK_V3, LLAMA31, QWEN3
from tests.unit.gateway.tool_calls.test_templates import TOOLS, template_of

CARD = ModelCard("m", 100, 256, [0], "", 0)
JSON = {"type": "json_object"}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}


def wanted(source: str, **fields: object) -> RequestedGrammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    request = msgspec.convert(body, ChatCompletionRequest)
    template = template_of(source)
    plan = plan_of(request, CARD, traits_of(template))
    prompt = template.render(plan.messages, plan.tools, plan.options)
    return demanded(plan, plan.parsing(prompt), wanted_by(request), {})


@pytest.mark.parametrize(
    ("source", "fields", "start"),
    [
        (QWEN3, {}, None),
        (QWEN3, {"tools": TOOLS}, None),
        (QWEN3, {"tools": TOOLS, "tool_choice": "none"}, None),
        (QWEN3, {"tools": TOOLS, "tool_choice": "required"}, '("<think>" thoughts SPACE)? calls'),
        (QWEN3, {"tools": [STRICT]}, '("<think>" thoughts SPACE)? (until_calls behind_trigger)* free'),
        (QWEN3, {"tools": TOOLS, "response_format": JSON}, '("<think>" thoughts SPACE)? (calls | answer)'),
        (LLAMA31, {"tools": TOOLS, "tool_choice": "required"}, "calls"),
        (LLAMA31, {"tools": [STRICT]}, None),
        (DEEPSEEK_V3, {"response_format": JSON}, "thoughts SPACE answer"),
        (DEEPSEEK_V3, {"tools": TOOLS, "tool_choice": "required"}, "thoughts SPACE calls"),
    ],
)
def test_what_is_demanded(source: str, fields: dict[str, object], start: str | None) -> None:
    found = wanted(source, **fields)
    rules = found.grammar.text.splitlines() if found else []
    assert [rule for rule in rules if rule.startswith("start:")] == ([f"start: {start}"] if start else [])


def test_a_format_alone_stays_as_it_is() -> None:
    found = wanted(LLAMA31, response_format=JSON)
    assert found.grammar.kind == "json_schema"


def test_a_template_of_single_calls_gets_one() -> None:
    one, several = (wanted(source, tools=TOOLS, tool_choice="required") for source in (LLAMA31, QWEN3))
    assert "call)*" not in one.grammar.text
    assert "call)*" in several.grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "guided_grammar": 'start: "a"'}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 2, "ignore_eos": True}, "min_tokens"),
        ({"tools": [STRICT | {"function": STRICT["function"] | {"parameters": {"a": "x" * (300 << 10)}}}]}, "tools"),  # type: ignore[operator]
    ],
)
def test_what_cannot_be_demanded(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        wanted(QWEN3, **fields)
    assert caught.value.param == param


def test_every_schema_can_be_checked_alone() -> None:
    request = msgspec.convert(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}, ChatCompletionRequest
    )
    schemas = list(schemas_of(plan_of(request, CARD, traits_of(template_of(QWEN3)))))
    assert [schema.param for schema in schemas] == [f"tools[{index}].function.parameters" for index in (0, 1)]
