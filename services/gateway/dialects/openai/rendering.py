"""The tokens that a model would read of a chat or a completion, as vLLM tells them."""

import msgspec

from services.gateway.api.backend import Ask


class RenderedPrompt(msgspec.Struct, frozen=True):
    """What a model would read of a request."""

    request_id: str
    model: str
    token_ids: list[int]


async def render_chat(ask: Ask) -> RenderedPrompt:
    intake = await ask.counted()
    model, tokens = await intake.processor.chat_rendered(await ask.body(ask.settings.body_limit), ask.tenant)
    return RenderedPrompt(ask.request_id, model, tokens)


async def render_completion(ask: Ask) -> list[RenderedPrompt]:
    intake = await ask.counted()
    model, prompts = await intake.processor.completion_rendered(
        await ask.body(ask.settings.body_limit), ask.tenant
    )
    return [RenderedPrompt(ask.request_id, model, tokens) for tokens in prompts]
