"""From a request's body to a `Run`: decoded, checked and tokenized."""

from typing import Literal

import msgspec

from services.gateway import validation
from services.gateway.build import Build, Context, Parts
from services.gateway.catalog import Catalog
from services.gateway.run import Run
from services.gateway.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.sessions import conversation_key, prompt_key
from services.gateway.tokenization import Tokenizer
from services.gateway.tokenizer_store import TokenizerStore
from shared.messages import ModelCard

Endpoint = Literal["chat.completions", "completions"]


class Intake:
    """Takes requests in; the same for REST and WebSocket."""

    def __init__(self, parts: Parts, catalog: Catalog, tokenizers: TokenizerStore) -> None:
        self._parts = parts
        self._catalog = catalog
        self._tokenizers = tokenizers
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._completion = msgspec.json.Decoder(CompletionRequest)

    async def prepare(self, endpoint: Endpoint, body: bytes | msgspec.Raw, context: Context) -> Run:
        """Raises `InvalidRequest` in all its forms, `Unavailable`."""
        if endpoint == "chat.completions":
            return await self._prepare_chat(validation.decode(body, self._chat), context)
        return await self._prepare_completion(validation.decode(body, self._completion), context)

    async def _prepare_chat(self, request: ChatCompletionRequest, context: Context) -> Run:
        validation.check_chat(request)
        card = self._catalog.card(request.model)
        tokenizer = await self._tokenizers.get(card)
        messages = chat_messages(request)
        prompt = await tokenizer.encode_chat(messages)
        session = context.session or request.prompt_cache_key or conversation_key(messages)
        return Build(self._parts, request, card, tokenizer, context, session).run([prompt])

    async def _prepare_completion(self, request: CompletionRequest, context: Context) -> Run:
        validation.check_completion(request)
        card = self._catalog.card(request.model)
        given = validation.prompts_of(request)
        tokenizer = await self._tokenizers.get(card)
        prompts = [await _prompt_ids(prompt, tokenizer, card) for prompt in given]
        session = context.session or request.prompt_cache_key or prompt_key(prompts[0])
        return Build(self._parts, request, card, tokenizer, context, session).run(prompts)


async def _prompt_ids(prompt: str | list[int], tokenizer: Tokenizer, card: ModelCard) -> list[int]:
    if isinstance(prompt, str):
        return await tokenizer.encode(prompt)
    validation.check_token_ids("prompt", prompt, card.vocab_size)
    return prompt


def chat_messages(request: ChatCompletionRequest) -> list[dict[str, str]]:
    """The conversation for a chat template. `developer` is OpenAI's new name of `system`."""
    messages = []
    for message in request.messages:
        role = "system" if message.role == "developer" else message.role
        shown = {"role": role, "content": validation.text_of(message)}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                shown[name] = value
        messages.append(shown)
    return messages
