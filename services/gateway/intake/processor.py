"""From a canonical request (a chat, a completion, inputs to embed) to a `StreamReader`: checked, rendered, tokenized,
recorded.

Other endpoints translate their requests into one of these before they come here, so the way leads down alone.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from services.gateway.core.catalog import Catalog, ModelNotLoaded
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.errors import InvalidParameter
from services.gateway.files.files import Files
from services.gateway.intake import validation
from services.gateway.intake.decoding import decode, lacks_model, with_model
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.prompts import embeddings
from services.gateway.intake.prompts.chat import NamesModel, rendered
from services.gateway.intake.prompts.embeddings import EmbeddingRequest
from services.gateway.intake.prompts.input_files import with_files_read
from services.gateway.intake.prompts.prefill import ahead, next_prompt, without_answer
from services.gateway.intake.record import (
    Context,
    OuterResponse,
    RunDependencies,
    record_of,
    run_of,
    tell_exact,
    text_run,
)
from services.gateway.intake.sampling.grammars import GrammarChecker
from services.gateway.intake.sampling.params import bad_words, check_token_ids, predicted
from services.gateway.intake.sampling.structured_output import closes_objects, demanded, schemas_of, wanted_by
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from services.gateway.intake.validation import check_task, check_text
from services.gateway.persistence.responses import StoredTurns
from services.gateway.ratelimit.limiter import Limiter
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.store import TokenizerStore
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.families import markers_of
from shared import tracing
from shared.messages import ModelCard

T = TypeVar("T")
# What every request becomes that is not a score's.
Canonical = ChatCompletionRequest | CompletionRequest | EmbeddingRequest
_chat = msgspec.json.Decoder(ChatCompletionRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def decoded_chat(body: bytes | msgspec.Raw, ignored: IgnoredFields) -> ChatCompletionRequest:
    """Fields of messages that are not known are told to `ignored`, or refused. Raises `InvalidParameter`."""
    dropped: list[str] | None = None if ignored.strict else []
    chat = decode(body, _chat, dropped)
    if dropped:
        ignored.tell(dropped)
    return chat


def decoded_completion(body: bytes | msgspec.Raw) -> CompletionRequest:
    """Raises `InvalidParameter`."""
    return decode(body, _completion)


class InputProcessor:
    """One per gateway."""

    def __init__(
        self,
        parts: RunDependencies,
        catalog: Catalog,
        cold_starts: ColdStarts,
        tokenizers: TokenizerStore,
        grammars: GrammarChecker,
        limiter: Limiter,
        files: Files,
        stored: StoredTurns,
    ) -> None:
        """`stored`: of earlier requests, for those that go on with them."""
        self.parts = parts
        self.stored = stored
        self._files = files
        self._limiter = limiter
        self._grammars = grammars
        self.strict = parts.settings.strict_fields
        self._catalog = catalog
        self._cold_starts = cold_starts
        self._tokenizers = tokenizers

    # --- what endpoints ask for -------------------------------------------------------------------

    def ignored(self, headers: dict[str, str]) -> IgnoredFields:
        """Where the fields of a request are told that change nothing: in `headers`."""
        return IgnoredFields(headers, self.strict)

    async def admit(self, context: Context) -> None:
        """Reserves what the limits allow. Raises `RateLimited`."""
        context.admission = self._limiter.admission(context.principal, context.lane, context.answer_headers)
        if context.admission is not None:
            await context.admission.request()

    def only_model(self) -> str:
        """The one that is served, or while none is the one that will be. Raises `InvalidParameter` where there are none
        or several."""
        names = [card.model for card in self._catalog.listed()] or self._catalog.names()
        if len(names) != 1:
            raise InvalidParameter(
                f"Missing required parameter: 'model'; {len(names)} models are served.",
                param="model",
                reason="missing_required_parameter",
            )
        return names[0]

    def of_some_model(self, decoded: Callable[[bytes | msgspec.Raw], T], body: bytes | msgspec.Raw) -> T:
        """`body`, decoded; where it names no model, with the one that is served. Raises `InvalidParameter`."""
        try:
            return decoded(body)
        except InvalidParameter as error:
            if not lacks_model(error):
                raise
        return decoded(with_model(body, self.only_model()))

    async def tokenizer(self, model: str, tenant: str | None = None) -> tuple[ModelCard, Tokenizer]:
        """A model's card and tokenizer. Raises `UnknownModel`, `Unavailable`."""
        card = self._catalog.card(model, tenant)
        return card, await self.tokenizer_of(card, tenant or "")

    async def tokenizer_of(self, card: ModelCard, tenant: str) -> Tokenizer:
        """Raises `Unavailable`."""
        return await self._tokenizers.get(card, tenant)

    async def speaker(self, model: str | None, tenant: str) -> tuple[ModelCard, Tokenizer]:
        """A model's card and tokenizer; None: of the one that is served. Raises `UnknownModel`, `InvalidParameter`
        where there are several, `Unavailable`."""
        return await self.tokenizer(self.only_model() if model is None else model, tenant)

    async def loaded(self, request: NamesModel, context: Context) -> ModelCard:
        """The card of the model that `request` names; one that was never loaded is waited for. Raises as
        `ColdStarts.card`."""
        return await self._cold_starts.card(
            request.model,
            context.tenant,
            size=lambda: len(msgspec.json.encode(request)),
            deadline=min(time.time() + self.parts.settings.token_timeout, context.deadline),
            gone=context.gone,
        )

    def resolve(self, name: str, card: ModelCard, context: Context) -> ModelCard:
        """The card with the sampling defaults of the client's `name`; `context` gets what that stands for. Raises
        `UnknownModel`."""
        card, context.model = self._catalog.of_request(name, card, context.tenant)
        return card

    def context_length(self, model: str, tenant: str) -> int:
        """Tokens that `model` reads at most. Raises `UnknownModel`."""
        return self._catalog.card(model, tenant).context_length

    async def chat_tokens(self, request: ChatCompletionRequest, tenant: str = "") -> int:
        """Tokens of the prompt, however many the context has. Raises as `prepare`."""
        return len(await self.chat_prompt(request, tenant))

    async def chat_prompt(self, request: ChatCompletionRequest, tenant: str = "") -> list[int]:
        """What the model would read. Raises as `prepare`."""
        validation.check_chat(request)
        request = await with_files_read(request, tenant, self._files)
        card, tokenizer = await self.tokenizer(request.model, tenant)
        return await tokenizer.encode_rendered((await rendered(request, card, tokenizer)).prompt)

    async def chat_rendered(self, body: bytes, tenant: str) -> tuple[str, list[int]]:
        """The model of the chat in `body`, and what it would read. Raises as `prepare`."""
        request = self.of_some_model(functools.partial(decode, decoder=_chat), body)
        return request.model, await self.chat_prompt(request, tenant)

    async def completion_rendered(self, body: bytes, tenant: str) -> tuple[str, list[list[int]]]:
        """As `chat_rendered`, of each prompt of a completion."""
        request = self.of_some_model(decoded_completion, body)
        validation.check_completion(request)
        card, tokenizer = await self.speaker(request.model, tenant)
        special = request.add_special_tokens is not False
        return request.model, await _prompt_ids(validation.prompts_of(request), tokenizer, card, special)

    # --- from a canonical request to its run ------------------------------------------------------

    async def run(self, request: Canonical, context: Context) -> StreamReader:
        """Raises as `Intake.prepare`."""
        if isinstance(request, ChatCompletionRequest):
            return await self.chat(request, context)
        if isinstance(request, CompletionRequest):
            return await self.completion(request, context)
        return await self.embedding(request, context)

    async def chat(
        self, request: ChatCompletionRequest, context: Context, response: OuterResponse | None = None
    ) -> StreamReader:
        """A chat completion; or with `response` the one that a response is inside. Raises as `prepare`."""
        settings = self.parts.settings
        ignored = validation.check_chat(request)
        card = await self._model(request, ignored, context)
        request = await with_files_read(request, context.tenant, self._files)
        tokenizer = await self._tokenizers.get(card, context.tenant)
        closes = closes_objects(request, usual=settings.close_objects)
        wanted = wanted_by(request, closes=closes)
        plan, rendering = await rendered(request, card, tokenizer, settings.prompt_limit)
        parsing = plan.parsing(rendering.text)
        if parsing is not None:
            wanted = demanded(plan, parsing, wanted, tokenizer.specials(markers_of(parsing)), closes=closes)
        if plan.ignored:
            told = map(response.own_name, plan.ignored) if response is not None else plan.ignored
            self.ignored(context.answer_headers).tell(told)
        schemas = schemas_of(plan)
        grammar = await self._grammars.checked(wanted, context.tenant, schemas) if wanted else None
        with tracing.stage("tokenize"):
            prompt = await tokenizer.encode_rendered(rendering)
        words = await bad_words(request, tokenizer)
        prediction = await predicted(request, card, tokenizer)
        record = record_of(
            [prompt],
            request,
            card,
            context,
            self.parts,
            grammar=grammar,
            parsing=parsing,
            response=response,
            bad_words=words,
            prediction=prediction,
        )
        if record.response is not None and record.response.prewarm:
            record = ahead(record)
        return text_run(record, request, card, tokenizer, context, self.parts)

    async def whole_answer(self, request: ChatCompletionRequest, context: Context) -> str:
        """The text of the answer to a chat, counted as a request of its own. Raises as `prepare`, and what ended it."""
        context = msgspec.structs.replace(
            context, key="", idempotency="", after=None, view=None, background=0.0, admission=None
        )
        await self.admit(context)
        run = await self.chat(request, context)
        try:
            await run.begin()
            return answer_text(await run.collect())
        finally:
            run.close()

    async def completion(self, request: CompletionRequest, context: Context) -> StreamReader:
        """Raises as `Intake.prepare`."""
        card = await self._model(request, validation.check_completion(request), context)
        given = validation.prompts_of(request)
        closes = self.parts.settings.close_objects
        grammar = await self._grammars.of(request, context.tenant, closes=closes)
        tokenizer = await self.tokenizer_of(card, context.tenant)
        special = request.add_special_tokens is not False
        with tracing.stage("tokenize"):
            limit, cut = self.parts.settings.prompt_limit, request.truncate_prompt_tokens is not None
            for text in given:
                if isinstance(text, str):
                    check_text("prompt", text, card, tokenizer, limit, cut=cut)
            prompts = await _prompt_ids(given, tokenizer, card, special)
        words = await bad_words(request, tokenizer)
        record = record_of(prompts, request, card, context, self.parts, grammar=grammar, bad_words=words)
        return text_run(record, request, card, tokenizer, context, self.parts)

    async def embedding(
        self, request: EmbeddingRequest, context: Context, endpoint: str = "embeddings"
    ) -> StreamReader:
        """A vector of each input. Raises as `Intake.prepare`."""
        given = embeddings.inputs_of(request)
        card = await self.loaded(request, context)
        card, context.model = self._catalog.of_request(request.model, card, context.tenant)
        embeddings.check(request, card)
        tokenizer = await self.tokenizer_of(card, context.tenant)
        limit = self.parts.settings.prompt_limit
        if request.messages is not None:
            chat = await with_files_read(embeddings.chat_of(request), context.tenant, self._files)
            given = [await tokenizer.encode_rendered((await rendered(chat, card, tokenizer)).prompt)]
        prompts = await embeddings.prompts_of(request, given, tokenizer, card, limit)
        record = embeddings.record_of(prompts, request, card, context, self.parts, endpoint)
        return run_of(record, sum(map(len, prompts)), card, tokenizer, context, self.parts)

    async def prefill(self, request: ChatCompletionRequest, context: Context) -> StreamReader:
        """What computes the prompt of a conversation so far before its next turn. Raises as `chat`, and
        `ModelNotLoaded`."""
        request = without_answer(request)
        ignored = validation.check_chat(request)
        card = self._catalog.card(request.model, context.tenant)
        if not self._catalog.has_ready_group(card.model):
            raise ModelNotLoaded(
                f"The model '{card.model[:128]}' is not loaded now, and preparing a prompt ahead loads no model; send "
                "the request itself.",
                param="model",
            )
        card = await self._model(request, ignored, context)
        request = await with_files_read(request, context.tenant, self._files)
        tokenizer = await self.tokenizer_of(card, context.tenant)
        with tracing.stage("tokenize"):
            prompt = await next_prompt(request, card, tokenizer, self.parts.settings.prompt_limit)
        record = ahead(record_of([prompt], request, card, context, self.parts))
        return text_run(record, request, card, tokenizer, context, self.parts)

    async def _model(self, request: GenerationFields, ignored: Sequence[str], context: Context) -> ModelCard:
        """The one that is to answer. `context` gets the request's own id, and `ignored` fields, which change nothing,
        are told. Raises as `loaded`, and `UnknownModel`."""
        if ignored:
            self.ignored(context.answer_headers).tell(ignored)
        if request.request_id is not None:
            context.request_id = context.answer_headers["x-request-id"] = request.request_id
        card = await self.loaded(request, context)
        card, context.model = self._catalog.of_request(request.model, card, context.tenant)
        check_task(card, "generate")
        return card

    def tell_exact(self, model: str, context: Context) -> None:
        """Of a generation that began earlier."""
        tell_exact(self._catalog.card_of_record(model), context)


async def _prompt_ids(
    prompts: Sequence[str | list[int]], tokenizer: Tokenizer, card: ModelCard, special: bool
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await tokenizer.encode_all(texts, special=special) if texts else ())
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, card.vocab_size)
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


def answer_text(completion: bytes) -> str:
    """The text of a chat completion as JSON."""
    return str(msgspec.json.decode(completion)["choices"][0]["message"]["content"] or "")
