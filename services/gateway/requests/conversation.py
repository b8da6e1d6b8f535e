"""From a chat request to the text that its model reads: the same for answers, for counting and for tokens."""

from typing import NamedTuple

from services.gateway.requests import extra_fields, validation
from services.gateway.requests.schemas import ChatCompletionRequest
from services.gateway.text.tokenization import Rendered, Tokenizer
from services.gateway.tools.plan import ChatPlan, plan_of
from shared.messages import ModelCard


class Planned(NamedTuple):
    plan: ChatPlan
    prompt: Rendered


def check_conversation(request: ChatCompletionRequest) -> None:
    """As far as that needs no model. Raises `InvalidParameter`."""
    validation.check_chat(request)
    extra_fields.check(request)


async def rendered(request: ChatCompletionRequest, card: ModelCard, tokenizer: Tokenizer) -> Planned:
    """A request that was checked, in the model's own form. Raises `InvalidParameter`, `QueueFull`."""
    plan = plan_of(request, card, tokenizer.traits)
    return Planned(plan, await tokenizer.render_chat(plan.messages, plan.tools, plan.options))
