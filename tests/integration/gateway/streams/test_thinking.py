"""Models that reason, as Ollama's and Anthropic's clients ask them to and see it: switches, levels, streamed."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared.messages import GenerationRequest
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, stub_card
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

USER: Any = {"role": "user", "content": "Hi"}
THOUGHTS, SAID = "Let me think.", "Yes."
SWITCHED, LEVELLED = "org/switched", "org/levelled"
TURNS = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|end|>\n{% endfor %}"
)
OFF = "<|start|>assistant\n<think>\n\n</think>\n\n"
# One whose reasoning is turned on and off, and one that always reasons, as long as it is told to.
TEMPLATES = {
    SWITCHED: TURNS + "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    LEVELLED: "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}"
    + TURNS
    + "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
}


class Thinkers:
    """Two models that reason, and the prompts that they were given."""

    def __init__(self, ring: FakeRing) -> None:
        self._ring = ring
        self._tokenizer = ModelTokenizer(tiny_files())

    async def start(self, http: httpx.AsyncClient) -> None:
        for name, template in TEMPLATES.items():
            files = name.replace("/", "-")
            await self._ring.add_tokenizer(files, tiny_files(template=template))
            await self._ring.add_model(stub_card(name, tokenizer=files, vocab_size=258))
            await until_listed(http, name)
        self._ring.behave = self._answer

    @property
    def prompt(self) -> str:
        """The last one."""
        return self._tokenizer.decode(self._ring.requests[-1].prompt, skip_special_tokens=False)

    async def _answer(self, ring: FakeRing, request: GenerationRequest) -> None:
        """A token a frame; thoughts too, where the prompt does not say that they are over."""
        text = SAID if self.prompt.endswith(OFF) else f"<think>{THOUGHTS}</think>\n\n{SAID}"
        (tokens,) = await self._tokenizer.encode_parts([("", text)])
        for position, token in enumerate(tokens):
            await ring.emit(request, position, [token])
        await ring.emit(request, len(tokens), [], finish="stop")


@pytest.fixture
async def thinkers(http: httpx.AsyncClient, ring: FakeRing) -> Thinkers:
    made = Thinkers(ring)
    await made.start(http)
    return made


@pytest.fixture
async def local(gateway: RunningGateway) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=gateway.url, timeout=20) as made:
        yield made


async def told(client: ollama.AsyncClient, model: str, think: Any, *, stream: bool) -> tuple[str, str]:
    """(thinking, content) of a chat."""
    if not stream:
        message = (await client.chat(model, [USER], think=think)).message
        return message.thinking or "", message.content or ""
    parts = [part.message async for part in await client.chat(model, [USER], think=think, stream=True)]
    return "".join(part.thinking or "" for part in parts), "".join(part.content or "" for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_ollamas_think(thinkers: Thinkers, local: ollama.AsyncClient, stream: bool) -> None:
    for model, think, shown, prompt in (
        (SWITCHED, None, THOUGHTS, "assistant\n"),
        (SWITCHED, True, THOUGHTS, "assistant\n"),
        (SWITCHED, "high", THOUGHTS, "assistant\n"),
        (SWITCHED, False, "", OFF),
        (LEVELLED, True, THOUGHTS, "assistant\n"),
        (LEVELLED, False, THOUGHTS, "assistant\n"),
        (LEVELLED, "low", THOUGHTS, "assistant\n"),
    ):
        assert await told(local, model, think, stream=stream) == (shown, SAID), (model, think)
        assert thinkers.prompt.endswith(prompt)
        assert thinkers.prompt.startswith("Effort: low\n") == (think == "low")


async def test_ollamas_prompts_and_turns_with_thoughts(thinkers: Thinkers, local: ollama.AsyncClient) -> None:
    assert "thinking" in (await local.show(SWITCHED)).capabilities
    made = await local.generate(SWITCHED, "Hi", think=True)
    assert (made.thinking, made.response) == (THOUGHTS, SAID)
    parts = [part async for part in await local.generate(SWITCHED, "Hi", think=False, stream=True)]
    assert "".join(part.response for part in parts) == SAID
    assert not any(part.thinking for part in parts)
    answer = await local.chat(SWITCHED, [USER])
    await local.chat(SWITCHED, [USER, answer.message, USER])
    assert f"<think>{THOUGHTS}</think>{SAID}" in thinkers.prompt
    with pytest.raises(ollama.ResponseError, match="Supported values of 'think' are: 'high', 'low', 'medium'"):
        await local._request_raw("POST", "/api/chat", json={"model": SWITCHED, "messages": [USER], "think": "lots"})


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_thinking_and_effort(
    thinkers: Thinkers, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    for model, more, shown, prompt in (
        (SWITCHED, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, "assistant\n"),
        (SWITCHED, {"thinking": {"type": "adaptive"}}, True, "assistant\n"),
        (SWITCHED, {"thinking": {"type": "disabled"}}, False, OFF),
        (LEVELLED, {"output_config": {"effort": "low"}}, True, "assistant\n"),
        (LEVELLED, {"thinking": {"type": "disabled"}}, True, "assistant\n"),
    ):
        asked: Any = {"model": model, "max_tokens": 1500, "messages": [USER], **more}
        if stream:
            async with claude.messages.stream(**asked) as events:
                message: Any = await events.get_final_message()
        else:
            message = await claude.messages.create(**asked)
        blocks = [{"type": "text", "text": SAID}]
        if shown:
            blocks.insert(0, {"type": "thinking", "thinking": THOUGHTS, "signature": ""})
        assert [block.model_dump(exclude_none=True) for block in message.content] == blocks, more
        assert thinkers.prompt.endswith(prompt)
        assert thinkers.prompt.startswith("Effort: low\n") == ("output_config" in more)
        thought = message.usage.output_tokens_details.thinking_tokens
        assert (0 < thought < message.usage.output_tokens) if shown else thought == 0
