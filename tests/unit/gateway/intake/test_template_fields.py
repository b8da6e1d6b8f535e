"""What fields of a chat are for the model's template."""

import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.schemas import ChatCompletionRequest, Message
from services.gateway.tokenizer.chat_template import ChatTemplate
from services.gateway.tokenizer.templates import TemplateOptions, Traits
from shared.messages import ModelCard

TEMPLATE = ChatTemplate(
    "{% if verbosity %}{{ verbosity }}:{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
)
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Once upon "}]


def asked(**fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[Message("user", "Hi")], **fields)  # type: ignore[arg-type]


def options_of(request: ChatCompletionRequest, traits: Traits) -> TemplateOptions:
    return plan_of(request, ModelCard("m", 100, 256, [], "", 0), traits).options


def test_verbosity_goes_to_templates_that_show_it() -> None:
    options = options_of(asked(verbosity="low"), Traits(variables=TEMPLATE.variables))
    assert TEMPLATE.render(TURNS[:1], options=options) == "low:<user>Hi</><assistant>"
    with pytest.raises(InvalidParameter, match="verbosity"):
        options_of(asked(verbosity="low"), Traits())
    assert options_of(asked(verbosity="medium"), Traits()).variables == {}


def test_an_answer_goes_on_with_the_last_message() -> None:
    options = options_of(asked(continue_final_message=True), Traits())
    assert TEMPLATE.render(TURNS, options=options) == "<user>Hi</><assistant>Once upon"
    assert options_of(asked(), Traits()).add_generation_prompt
    plain = TEMPLATE.render(TURNS, options=TemplateOptions(add_generation_prompt=False))
    assert plain == "<user>Hi</><assistant>Once upon</>"


@pytest.mark.parametrize("content", ["", None])
def test_nothing_cannot_be_gone_on_with(content: str | None) -> None:
    options = TemplateOptions(add_generation_prompt=False, continue_final=True)
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        TEMPLATE.render([{"role": "assistant", "content": content}], options=options)
