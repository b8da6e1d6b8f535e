"""From a checked, tokenized request to its generations and the `Run` that reads them."""

import secrets
import time
from collections.abc import Sequence

import msgspec

from services.gateway import sampling, validation
from services.gateway.errors import InvalidParameter
from services.gateway.formats import ChatFormat, CompletionFormat
from services.gateway.generation import Generation, Limits
from services.gateway.generations import Generations
from services.gateway.mailbox import Mailbox
from services.gateway.metrics import GatewayMetrics
from services.gateway.run import Run
from services.gateway.schemas import ChatCompletionRequest, GenerationFields
from services.gateway.settings import GatewaySettings
from services.gateway.text_output import TextOutput
from services.gateway.tokenization import Tokenizer
from shared.messages import GenerationRequest, ModelCard


class Context(msgspec.Struct, frozen=True):
    """What a request brings besides its body."""

    request_id: str
    session: str = ""
    """The X-Session-ID header."""


class Parts(msgspec.Struct, frozen=True):
    """What every run is made with."""

    settings: GatewaySettings
    consumer: str
    """The gateway's instance, whose token subject the rings publish to."""
    generations: Generations
    metrics: GatewayMetrics


class Build:
    """The generations of one request. Choice c of prompt p has the index p * n + c, as in OpenAI's API."""

    def __init__(
        self,
        parts: Parts,
        request: GenerationFields,
        card: ModelCard,
        tokenizer: Tokenizer,
        context: Context,
        session: str,
    ) -> None:
        """Raises `InvalidParameter`."""
        self._parts = parts
        self._request = request
        self._card = card
        self._tokenizer = tokenizer
        self._context = context
        self._session = session
        self._chat = isinstance(request, ChatCompletionRequest)
        self._identity = secrets.token_hex(12)
        self._sampling = sampling.sampling_params(request, card)
        self._stop_ids = sampling.stop_token_ids(request, card)
        self._stops = validation.stop_strings(request)
        self._mailbox = Mailbox()
        self._now, self._started_at = time.monotonic(), time.time()

    def run(self, prompts: Sequence[list[int]]) -> Run:
        """Raises `InvalidParameter`, `ContextLengthExceeded`."""
        count, options = self._request.n or 1, self._request.stream_options
        include_usage = bool(options and options.include_usage)
        generations = [
            self._choice(index * count + choice, choice, prompt)
            for index, prompt in enumerate(prompts)
            for choice in range(count)
        ]
        shape = (ChatFormat if self._chat else CompletionFormat)(
            self._identity,
            self._card.model,
            int(self._started_at),
            self._tokenizer,
            include_usage=include_usage,
        )
        return Run(
            generations,
            [self._output(generation.request) for generation in generations],
            self._mailbox,
            shape,
            self._parts.generations,
            self._parts.metrics.of_model(self._card.model),
            stream=bool(self._request.stream),
            include_usage=include_usage,
        )

    def _choice(self, index: int, choice: int, prompt: list[int]) -> Generation:
        settings = self._parts.settings
        if not prompt:
            param = "messages" if self._chat else "prompt"
            raise InvalidParameter(
                f"Invalid '{param}': it resulted in no token; send at least one character.",
                param=param,
                reason="empty_prompt",
            )
        params = self._sampling
        if choice:
            params = msgspec.structs.replace(params, seed=sampling.seed_of_choice(params.seed, choice))
        limit = sampling.max_tokens(self._request, self._card, len(prompt), settings.default_max_tokens)
        validation.check_min_tokens(self._request, limit)
        wire = GenerationRequest(
            generation_id=f"{self._identity}-{index}",
            request_id=self._context.request_id,
            model=self._card.model,
            consumer=self._parts.consumer,
            prompt=prompt,
            max_tokens=limit,
            sampling=params,
            stop_token_ids=self._stop_ids,
            session=self._session,
            deadline=self._started_at + settings.token_timeout,
        )
        limits = Limits(settings.recovery_attempts, settings.token_timeout, settings.stall_timeout)
        return Generation(wire, index, limits, self._mailbox.put, now=self._now, started_at=self._started_at)

    def _output(self, wire: GenerationRequest) -> TextOutput:
        detokenizer = self._tokenizer.detokenizer(
            [] if self._chat else wire.prompt,  # a chat's answer begins a text, a completion goes on
            skip_special_tokens=self._request.skip_special_tokens is not False,
        )
        return TextOutput(detokenizer, self._stops, wire.stop_token_ids, logprobs=wire.sampling.logprobs >= 0)
