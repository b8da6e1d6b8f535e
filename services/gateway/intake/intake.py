"""From a request's body to a `Run`: decoded, checked and tokenized, or found by its idempotency key."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from services.gateway.auth.authenticator import Authenticator, Principal
from services.gateway.core.catalog import Catalog, ModelNotLoaded
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from services.gateway.intake import embeddings, extra_fields, rules, sampling
from services.gateway.intake.anthropic.intake import MessagesIntake
from services.gateway.intake.anthropic.schemas import MessagesRequest
from services.gateway.intake.chat import ChatPlan, NamesModel, demanded, rendered, schemas_of
from services.gateway.intake.decoding import decode, lacks_model, with_model
from services.gateway.intake.endpoints import (
    POOLED,
    Decoded,
    Endpoint,
    Pooled,
    check_pooled,
    invoked,
    is_response,
    streamed,
)
from services.gateway.intake.headers import EXACT_HEADER, tell_ignored
from services.gateway.intake.input_files import FileReader, with_files_read
from services.gateway.intake.prefill import Prefill, Prefills, ahead, next_prompt, without_answer
from services.gateway.intake.record import Context, OuterResponse, Parts, may_cost, record_of, run_of
from services.gateway.intake.responses.history import History
from services.gateway.intake.responses.intake import ResponseIntake
from services.gateway.intake.responses.schemas import ResponseRequest
from services.gateway.intake.sampling import cache_key, conversation_key
from services.gateway.intake.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    are_texts,
)
from services.gateway.intake.scoring.records import scoring_record
from services.gateway.intake.scoring.schemas import (
    ClassifyRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    ScoringRequest,
    classes_wanted,
)
from services.gateway.intake.structured_output import Grammars, Wanted, closes_objects, wanted_by
from services.gateway.lifecycle.idempotency import ABANDONED, POLL, IdempotencyKeys, entry_name, fingerprint
from services.gateway.ratelimit.limiter import Limiter
from services.gateway.streams.reading import Reading
from services.gateway.streams.run import Run
from services.gateway.tokenizer.store import TokenizerStore
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.families import markers_of
from shared import tracing
from shared.errors import Unavailable
from shared.messages import Grammar, ModelCard
from shared.messages.records import GenerationRecord, Idempotency, RecordedEndpoint
from shared.nats.kv import Contention, Entry

log = structlog.get_logger(__name__)

T = TypeVar("T")
SHOWN_OF_USER = 64
"""Characters of `user` that logs show: it is a client's text."""


class Intake:
    """Takes requests in; the same for REST and WebSocket."""

    def __init__(
        self,
        parts: Parts,
        catalog: Catalog,
        cold_starts: ColdStarts,
        tokenizers: TokenizerStore,
        keys: IdempotencyKeys,
        reading: Reading,
        grammars: Grammars,
        authenticator: Authenticator,
        limiter: Limiter,
        history: History,
        files: FileReader,
    ) -> None:
        self._files = files
        self._authenticator = authenticator
        self._limiter = limiter
        self._keys = keys
        self._grammars = grammars
        self._reading = reading
        self._parts = parts
        self._strict = parts.settings.strict_fields
        self._catalog = catalog
        self._cold_starts = cold_starts
        self._tokenizers = tokenizers
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._pooled: dict[str, msgspec.json.Decoder[Pooled]] = {
            "embeddings": msgspec.json.Decoder(embeddings.EmbeddingRequest),
            "rerank": msgspec.json.Decoder(RerankRequest),
            "score": msgspec.json.Decoder(ScoreRequest),
            "classify": msgspec.json.Decoder(ClassifyRequest),
            "pooling": msgspec.json.Decoder(PoolingRequest),
        }
        self.large = LargeRequests()
        self.prefills = Prefills()
        self.responses = ResponseIntake(self, history, parts.settings, parts.answers.writer)
        """It comes back here with the chat that a response is inside."""
        self.messages = MessagesIntake(self, parts.settings)
        """It comes back here with the chat that a message becomes."""

    async def prepare(
        self,
        endpoint: Endpoint,
        body: bytes | msgspec.Raw,
        context: Context,
        *,
        always_streamed: bool = False,
    ) -> Run:
        """A large one is decoded in its turn. `always_streamed`: the connection knows no other way, so `stream` need
        not be given.

        Raises `InvalidRequest` in all its forms, `Unavailable`.
        """
        self._authenticator.check(context.principal)
        if endpoint == "invocations":
            endpoint = invoked(body)
        if context.key:
            make = functools.partial(self._prepared, endpoint, body, always_streamed)
            return await self._repeatable(endpoint, fingerprint(body), context, make)
        return await self._prepared(endpoint, body, always_streamed, context)

    async def _prepared(
        self, endpoint: Endpoint, body: bytes | msgspec.Raw, always_streamed: bool, context: Context
    ) -> Run:
        with tracing.stage("prepare"):
            context = await self._admitted(context)
            if type(body) is not bytes or len(body) > LARGE_REQUEST:
                await self.large.turn(context.tenant, memoryview(body).nbytes)
            try:
                return await self._prepared_admitted(endpoint, body, always_streamed, context)
            except InvalidParameter as error:
                if not lacks_model(error):
                    raise
            body = with_model(body, self._only_model())
            return await self._prepared_admitted(endpoint, body, always_streamed, context)

    async def _prepared_admitted(
        self, endpoint: Endpoint, body: bytes | msgspec.Raw, always_streamed: bool, context: Context
    ) -> Run:
        if endpoint == "responses":
            return await self.responses.prepare(body, context, always_streamed=always_streamed)
        if endpoint == "messages":
            return await self.messages.prepare(body, context, always_streamed=always_streamed)
        request = self._decoded(endpoint, body, context.answer_headers)
        return await self._prepare_checked(streamed(request) if always_streamed else request, context)

    def _only_model(self) -> str:
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

    async def prepare_decoded(
        self, endpoint: str, request: Decoded, context: Context, print_: str = ""
    ) -> Run:
        """As `prepare`, for a request that came in another form than JSON. Idempotency keys belong to
        `endpoint`; `print_` is the fingerprint of the body, needed where there is one."""

        self._authenticator.check(context.principal)
        if context.key:
            make = functools.partial(self._prepared_decoded, request)
            return await self._repeatable(endpoint, print_, context, make)
        return await self._prepared_decoded(request, context)

    async def _prepared_decoded(self, request: Decoded, context: Context) -> Run:
        with tracing.stage("prepare"):
            return await self._prepare_checked(request, await self._admitted(context))

    async def tokenizer(self, model: str, tenant: str | None = None) -> tuple[ModelCard, Tokenizer]:
        """A model's card and tokenizer. Raises `UnknownModel`, `Unavailable`."""
        card = self._catalog.card(model, tenant)
        return card, await self._tokenizers.get(card, tenant or "")

    def check(
        self, endpoint: Endpoint, body: bytes | msgspec.Raw
    ) -> GenerationFields | ResponseRequest | MessagesRequest | Pooled:
        """`body`, decoded and checked as far as that needs no tokenizer. Raises `InvalidRequest`."""
        if endpoint == "responses":
            return self.responses.check(body, {})
        if endpoint == "messages":
            return self.messages.check(body)
        request = self._decoded(endpoint, body, {})
        if isinstance(request, Pooled):
            check_pooled(request)
            return request
        self._tell_ignored(extra_fields.ignored_fields(request), {})
        if isinstance(request, ChatCompletionRequest):
            rules.check_chat(request)
        else:
            rules.check_completion(request)
        return request

    def _decoded(
        self, endpoint: Endpoint, body: bytes | msgspec.Raw, answer_headers: dict[str, str]
    ) -> Decoded:
        """Of a chat, fields of messages that are not known are told in `answer_headers`, or refused."""
        if (pooled := self._pooled.get(endpoint)) is not None:
            return decode(body, pooled)
        if endpoint != "chat.completions":
            return decode(body, self._completion)
        return self._decoded_chat(body, answer_headers)

    def _decoded_chat(
        self, body: bytes | msgspec.Raw, answer_headers: dict[str, str]
    ) -> ChatCompletionRequest:
        dropped: list[str] | None = None if self._strict else []
        chat = decode(body, self._chat, dropped)
        if dropped:
            self._tell_ignored(dropped, answer_headers)
        return chat

    async def speaker(self, model: str | None, tenant: str) -> tuple[ModelCard, Tokenizer]:
        """A model's card and tokenizer; None: of the one that is served. Raises `UnknownModel`, `InvalidParameter`
        where there are several, `Unavailable`."""
        card = self._catalog.card(self._only_model() if model is None else model, tenant)
        return card, await self._tokenizers.get(card, tenant)

    async def count(self, principal: Principal, headers: dict[str, str]) -> None:
        """Counts a request that generates nothing. `headers` gets what the answer should say. Raises `RateLimited`."""
        admission = self._limiter.admission(principal, "interactive", headers)
        if admission is not None:
            await admission.request()

    async def _repeatable(
        self, endpoint: str, print_: str, context: Context, make: Callable[[Context], Awaitable[Run]]
    ) -> Run:
        """A reading of what the key stands for, or a new request that has taken the key."""
        name = entry_name(context.tenant, endpoint, context.key)
        context = msgspec.structs.replace(context, idempotency=name)
        contention = Contention("what the Idempotency-Key stands for")
        while True:
            known = await self._keys.get(name, print_)
            if known is not None and (run := await self._repeat(known, context)) is not None:
                record = run.answer.record
                if record.endpoint not in POOLED:
                    self._tell_exact(self._catalog.card_of_record(record.requests[0].model), context)
                return run
            if context.after is not None:
                raise RouteError(
                    "No generation is known under this Idempotency-Key (any more), so there is no stream to resume; "
                    "leave out Last-Event-ID to start a new one.",
                    status=404,
                    reason="generation_not_found",
                )
            run = await make(context)
            if await self._keys.take(name, run.answer.identity, print_, known):
                return run
            contention.lost()

    async def _repeat(self, known: Entry[Idempotency], context: Context) -> Run | None:
        """None when the key stands for nothing (any more)."""
        give_up = time.monotonic() + ABANDONED
        while True:
            try:
                run = await self._reading.attach(
                    known.value.identity,
                    context.after,
                    how="idempotency",
                    view=context.view,
                    tenant=context.tenant,
                )
            except RouteError:
                if time.monotonic() >= give_up:
                    return None
                await asyncio.sleep(POLL)  # whoever was first is about to write its record
                continue
            if not await self._reading.over(run.answer):
                return run
            run.close()
            return None

    async def _admitted(self, context: Context) -> Context:
        """`context` with what its limits have reserved. Raises `RateLimited`."""
        admission = self._limiter.admission(context.principal, context.lane, context.answer_headers)
        if admission is None:
            return context
        await admission.request()
        return msgspec.structs.replace(context, admission=admission)

    async def _prepare_checked(self, request: Decoded, context: Context) -> Run:
        if isinstance(request, ChatCompletionRequest):
            return await self.chat_run(request, context)
        if isinstance(request, PoolingRequest):
            return await self._pool(request, context)
        if isinstance(request, embeddings.EmbeddingRequest):
            return await self._embed(request, context)
        if isinstance(request, ScoringRequest):
            return await self._score(request, context)
        return await self._prepare_completion(request, context)

    async def chat_run(
        self, request: ChatCompletionRequest, context: Context, response: OuterResponse | None = None
    ) -> Run:
        """A chat completion; or with `response` the one that a response is inside. Raises as `prepare`."""
        rules.check_chat(request)
        context = self._named(request, context)
        card = self._catalog.card_at_hand(request.model) or await self.loaded(request, context)
        card, context = self._as_named(request.model, card, context)
        rules.check_task(card, "generate")
        closes = closes_objects(request, usual=self._parts.settings.close_objects)
        answer = wanted_by(request, closes=closes)
        if not are_texts(request.messages):
            request = await with_files_read(request, context.tenant, self._files)
        tokenizer = await self._tokenizers.get(card, context.tenant)
        plan, rendering = await rendered(request, card, tokenizer)
        if plan.ignored:
            told = map(response.own_name, plan.ignored) if response is not None else plan.ignored
            self._tell_ignored(told, context.answer_headers)
        text = rendering.text
        cut = request.truncate_prompt_tokens is not None
        sampling.check_text("messages", text, card, tokenizer, self._parts.settings.prompt_limit, cut=cut)
        parsing = plan.parsing(text)
        if parsing is not None:
            specials = tokenizer.specials(markers_of(parsing))
            answer = demanded(plan, parsing, answer, specials, closes=closes)
        grammar = await self._grammar(plan, answer, context.tenant) if answer is not None else None
        with tracing.stage("tokenize"):
            prompt = await tokenizer.encode_rendered(rendering)
        session = context.session
        if not session:
            session = cache_key(request.prompt_cache_key) or conversation_key(request.messages)
        extras = await extra_fields.extras_of(request, card, tokenizer)
        record = record_of(
            [prompt],
            request,
            card,
            context,
            self._parts,
            session=session,
            grammar=grammar,
            parsing=parsing,
            response=response,
            extras=extras,
        )
        if record.response is not None and record.response.prewarm:
            record = ahead(record)
        return self._run(record, request, card, tokenizer, context)

    async def prefill(self, body: bytes, context: Context) -> Prefill:
        """Has the prompt of a conversation so far, of the session that `context` names, computed before its next turn.
        `body`: of a chat completion, or of a response with its `input`. Raises as `prepare`, and `ModelNotLoaded`."""
        self._authenticator.check(context.principal)
        context = await self._admitted(context)
        await self.large.turn(context.tenant, len(body))
        if is_response(body):
            with self.responses.history.budget(context.tenant) as budget:
                request = await self.responses.chat_of(body, context.tenant, budget)
        else:
            decoded = functools.partial(self._decoded_chat, answer_headers=context.answer_headers)
            request = self.of_some_model(decoded, body)
        request = without_answer(request)
        rules.check_chat(request)
        context = self._named(request, context)
        card = self._catalog.card(request.model, context.tenant)
        if not self._catalog.has_ready_group(card.model):
            raise ModelNotLoaded(
                f"The model '{card.model[:128]}' is not loaded now, and preparing a prompt ahead loads no model; send "
                "the request itself.",
                param="model",
            )
        card, context = self._as_named(request.model, card, context)
        rules.check_task(card, "generate")
        request = await with_files_read(request, context.tenant, self._files)
        tokenizer = await self._tokenizers.get(card, context.tenant)
        with tracing.stage("tokenize"):
            prompt = await next_prompt(request, card, tokenizer, self._parts.settings.prompt_limit)
        extras = await extra_fields.extras_of(request, card, tokenizer)
        record = ahead(
            record_of([prompt], request, card, context, self._parts, session=context.session, extras=extras)
        )
        return await self.prefills.begin(
            self._run(record, request, card, tokenizer, context), context.session
        )

    def _run(
        self,
        record: GenerationRecord,
        request: GenerationFields,
        card: ModelCard,
        tokenizer: Tokenizer,
        context: Context,
    ) -> Run:
        self._tell_exact(card, context)
        if record.user:
            log.info("generation_user", generation_id=record.identity, user=record.user[:SHOWN_OF_USER])
        return run_of(record, may_cost(record, request), card, tokenizer, context, self._parts)

    def _tell_exact(self, card: ModelCard, context: Context) -> None:
        context.answer_headers[EXACT_HEADER] = "true" if card.exact else "false"

    async def loaded(self, request: NamesModel, context: Context) -> ModelCard:
        """The card of the model that `request` names; one that was never loaded is waited for. Raises as
        `ColdStarts.card`."""
        return await self._cold_starts.card(
            request.model,
            context.tenant,
            size=lambda: len(msgspec.json.encode(request)),
            deadline=min(time.time() + self._parts.settings.token_timeout, context.deadline),
            gone=context.gone,
        )

    def _as_named(self, name: str, card: ModelCard, context: Context) -> tuple[ModelCard, Context]:
        """The card with the sampling defaults of the client's `name`, and `context` with the LoRA adapter that it
        stands for now, and with how its requests attend: the request keeps it to its end. Raises `UnknownModel`."""
        resolved = self._catalog.resolve(name, context.tenant)
        if resolved.model != card.model:  # while the model was waited for
            raise Unavailable(f"'{name[:128]}' has just become another model; try again.", retry_after=1)
        if resolved.defaults:
            card = msgspec.structs.replace(card, defaults={**card.defaults, **resolved.defaults})
        named: dict[str, Any] = (
            {"adapter": resolved.adapter, "adapter_name": resolved.name} if resolved.adapter else {}
        )
        kinds = self._catalog.sparse_kinds(card.model)
        if kinds.some != card.sparse:
            card = msgspec.structs.replace(card, sparse=kinds.some)
        if resolved.sparse is not None:
            named["sparse"] = resolved.sparse
            named["sparse_unasked"] = resolved.sparse.kind in kinds.everywhere
        return card, msgspec.structs.replace(context, **named) if named else context

    def context_length(self, model: str, tenant: str) -> int:
        """Tokens that `model` reads at most. Raises `UnknownModel`."""
        return self._catalog.card(model, tenant).context_length

    async def whole_answer(self, request: ChatCompletionRequest, context: Context) -> str:
        """The text of the answer to a chat, counted as a request of its own. Raises as `prepare`, and what ended it."""
        context = msgspec.structs.replace(
            context, key="", idempotency="", after=None, view=None, background=0.0, admission=None
        )
        run = await self.chat_run(request, await self._admitted(context))
        try:
            await run.begin()
            return answer_text(await run.collect())
        finally:
            run.close()

    async def chat_tokens(self, request: ChatCompletionRequest, tenant: str = "") -> int:
        """Tokens of the prompt, however many the context has. Raises as `prepare`."""
        return len(await self.chat_prompt(request, tenant))

    async def chat_prompt(self, request: ChatCompletionRequest, tenant: str = "") -> list[int]:
        """What the model would read. Raises as `prepare`."""
        rules.check_chat(request)
        request = await with_files_read(request, tenant, self._files)
        card = self._catalog.card(request.model, tenant)
        tokenizer = await self._tokenizers.get(card, tenant)
        return await tokenizer.encode_rendered((await rendered(request, card, tokenizer)).prompt)

    async def chat_rendered(self, body: bytes, tenant: str) -> tuple[str, list[int]]:
        """The model of the chat in `body`, and what it would read. Raises as `prepare`."""
        request = self.of_some_model(functools.partial(decode, decoder=self._chat), body)
        return request.model, await self.chat_prompt(request, tenant)

    def of_some_model(self, decoded: Callable[[bytes], T], body: bytes) -> T:
        """`body`, decoded; where it names no model, with the one that is served. Raises `InvalidParameter`."""
        try:
            return decoded(body)
        except InvalidParameter as error:
            if not lacks_model(error):
                raise
        return decoded(with_model(body, self._only_model()))

    async def completion_rendered(self, body: bytes, tenant: str) -> tuple[str, list[list[int]]]:
        """As `chat_rendered`, of each prompt of a completion."""
        request = self.of_some_model(functools.partial(decode, decoder=self._completion), body)
        rules.check_completion(request)
        card, tokenizer = await self.speaker(request.model, tenant)
        special = request.add_special_tokens is not False
        return request.model, await _prompt_ids(rules.prompts_of(request), tokenizer, card, special)

    async def _grammar(self, plan: ChatPlan, wanted: Wanted, tenant: str) -> Grammar | None:
        """Raises `InvalidParameter`, which names the function whose schema does not compile, `QueueFull`,
        `RateLimited`."""
        try:
            return await self._grammars.checked(wanted, tenant)
        except InvalidParameter:
            for schema in schemas_of(plan) if plan.family else ():
                await self._grammars.checked(schema, tenant)
            raise

    def _named(self, request: GenerationFields, context: Context) -> Context:
        """`context` under the request's own id. Tells of fields that change nothing."""
        if ignored := extra_fields.ignored_fields(request):
            self._tell_ignored(ignored, context.answer_headers)
        if request.request_id is None:
            return context
        context.answer_headers["x-request-id"] = request.request_id
        return msgspec.structs.replace(context, request_id=request.request_id)

    def _tell_ignored(self, names: Iterable[str], headers: dict[str, str]) -> None:
        tell_ignored(names, headers, strict=self._strict)

    async def _pool(self, request: PoolingRequest, context: Context) -> Run:
        embeddings.inputs_of(request)
        classes = classes_wanted(request, await self.loaded(request, context))
        if classes is None:
            return await self._embed(request, context, "pooling")
        return await self._score(classes, context, endpoint="pooling", **embeddings.encoding_of(request))

    async def _embed(
        self,
        request: embeddings.EmbeddingRequest,
        context: Context,
        endpoint: RecordedEndpoint = "embeddings",
    ) -> Run:
        given = embeddings.inputs_of(request)
        card = await self.loaded(request, context)
        card, context = self._as_named(request.model, card, context)
        embeddings.check(request, card)
        tokenizer = await self._tokenizers.get(card, context.tenant)
        limit = self._parts.settings.prompt_limit
        if request.messages is not None:
            chat = await with_files_read(embeddings.chat_of(request), context.tenant, self._files)
            given = [await tokenizer.encode_rendered((await rendered(chat, card, tokenizer)).prompt)]
        prompts = await embeddings.prompts_of(request, given, tokenizer, card, limit)
        record = embeddings.record_of(prompts, request, card, context, self._parts, endpoint)
        return run_of(record, sum(map(len, prompts)), card, tokenizer, context, self._parts)

    async def _score(self, request: ScoringRequest, context: Context, **shown: Any) -> Run:
        """`shown`: fields of the record that say how it is shown, where that is not as scores are."""
        check_pooled(request)
        card = await self.loaded(request, context)
        card, context = self._as_named(request.model, card, context)
        tokenizer = await self._tokenizers.get(card, context.tenant)
        with tracing.stage("tokenize"):
            record = await scoring_record(request, card, tokenizer, context, self._parts)
        if shown:
            record = msgspec.structs.replace(record, **shown)
        cost = sum(len(one.prompt) for one in record.requests)
        return run_of(record, cost, card, tokenizer, context, self._parts)

    async def _prepare_completion(self, request: CompletionRequest, context: Context) -> Run:
        rules.check_completion(request)
        context = self._named(request, context)
        card = await self.loaded(request, context)
        card, context = self._as_named(request.model, card, context)
        rules.check_task(card, "generate")
        given = rules.prompts_of(request)
        closes = self._parts.settings.close_objects
        grammar = await self._grammars.of(request, context.tenant, closes=closes)
        tokenizer = await self._tokenizers.get(card, context.tenant)
        special = request.add_special_tokens is not False
        with tracing.stage("tokenize"):
            limit, cut = self._parts.settings.prompt_limit, request.truncate_prompt_tokens is not None
            for text in given:
                if isinstance(text, str):
                    sampling.check_text("prompt", text, card, tokenizer, limit, cut=cut)
            prompts = await _prompt_ids(given, tokenizer, card, special)
        extras = await extra_fields.extras_of(request, card, tokenizer)
        session = context.session or cache_key(request.prompt_cache_key)
        record = record_of(
            prompts, request, card, context, self._parts, session=session, grammar=grammar, extras=extras
        )
        return self._run(record, request, card, tokenizer, context)


async def _prompt_ids(
    prompts: Sequence[str | list[int]], tokenizer: Tokenizer, card: ModelCard, special: bool
) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await tokenizer.encode_all(texts, special=special) if texts else ())
    for prompt in prompts:
        if not isinstance(prompt, str):
            rules.check_token_ids("prompt", prompt, card.vocab_size)
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


def answer_text(completion: bytes) -> str:
    """The text of a chat completion as JSON."""
    return str(msgspec.json.decode(completion)["choices"][0]["message"]["content"] or "")
