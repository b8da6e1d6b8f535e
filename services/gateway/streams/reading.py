"""Generations by their id, whoever took them in: read from their beginning or from where a client stands, looked at,
cancelled.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Protocol

import msgspec

from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import ErrorDetail, describe
from services.gateway.core.metrics import GatewayMetrics, ModelMetrics
from services.gateway.lifecycle.answer import Answer, parse
from services.gateway.lifecycle.answers import Answers, unknown_generation
from services.gateway.streams import cursor
from services.gateway.streams.embeddings import VectorFormat, VectorOutput
from services.gateway.streams.formats import ChatFormat, CompletionFormat, Format, PromptIds, Shown
from services.gateway.streams.output import Output, ParsedOutput, TextOutput
from services.gateway.streams.prompt_logprobs import EchoedPrompt, PromptList
from services.gateway.streams.response_run import ResponseRun
from services.gateway.streams.run import Owner, Run
from services.gateway.tokenizer.store import TokenizerStore
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.families import markers_of
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord


class View(Protocol):
    """How a reader sees answers that are not shown in the format of the endpoint that began them."""

    def shape(self, answer: Answer, tokenizer: Tokenizer) -> Format: ...

    def output(self, answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> Output: ...


def new_run(
    answer: Answer,
    tokenizer: Tokenizer,
    answers: Owner,
    *,
    metrics: ModelMetrics | None = None,
    after: Sequence[int] | None = None,
    view: View | None = None,
) -> Run:
    """`metrics`: where its tokens are counted, None for what was counted before. `after`: the client's
    positions; None: it has seen nothing. `view`: None for the format of its endpoint."""
    if view is not None:
        seen = [view.output(answer, generation.request, tokenizer) for generation in answer.generations]
        seen_as = view.shape(answer, tokenizer)
        return Run(answer, seen, seen_as, answers, metrics, after=after, as_recorded=False)
    record = answer.record
    if record.endpoint == "embeddings":
        vectors = VectorFormat(record.requests[0].model, as_base64=record.base64)
        inputs = [VectorOutput(record.dimensions) for _ in answer.generations]
        return Run(answer, inputs, vectors, answers, metrics, after=after)
    if record.endpoint == "responses":
        output = output_of(answer, record.requests[0], tokenizer)
        return ResponseRun(answer, output, tokenizer, answers, metrics, after=after)
    shape = _shape(answer, tokenizer)
    outputs = [output_of(answer, generation.request, tokenizer) for generation in answer.generations]
    return Run(answer, outputs, shape, answers, metrics, after=after)


def output_of(answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> Output:
    """The text of one choice as its record wants it, with what is not text taken out of it."""
    record = answer.record
    chat = record.endpoint != "completions"
    detokenizer = tokenizer.detokenizer(
        [] if chat and not record.continues else request.prompt,  # a chat's answer begins a text
        skip_special_tokens=record.skip_special_tokens,
        keep=markers_of(record.parsing),
    )
    logprobs = request.sampling.logprobs >= 0
    output = TextOutput(
        detokenizer,
        record.stop,
        request.stop_token_ids,
        logprobs=logprobs,
        include_stop=record.include_stop,
        min_tokens=request.sampling.min_tokens,
        prompt_scores=request.prompt_logprobs >= 0,
        score_end=record.echo and request.prompt_logprobs >= 0,
        token_ids=record.token_ids,
        told_stop_ids=record.stop_token_ids,
    )
    if record.parsing is None:
        return output
    return ParsedOutput(output, record.parsing, request.generation_id)


def _shape(answer: Answer, tokenizer: Tokenizer) -> Format:
    """How a chat completion's answer, or a completion's, is shown."""
    record = answer.record
    logprobs = record.requests[0].sampling.logprobs >= 0 and not record.hide_logprobs
    prompts = prompt_list(answer, tokenizer)
    ids = PromptIds([item.request for item in answer.generations]) if record.token_ids else None
    identity, model, created = record.identity, record.requests[0].model, int(record.created)
    usage, tier = record.include_usage, record.service_tier
    if record.endpoint == "chat.completions":
        return ChatFormat(
            identity,
            model,
            created,
            tokenizer,
            include_usage=usage,
            parsing=record.parsing,
            rings=answer,
            service_tier=tier,
            logprobs=logprobs,
            prompts=prompts,
            tokens_as_ids=record.tokens_as_ids,
            ids=ids,
        )
    shape = CompletionFormat(
        identity,
        model,
        created,
        tokenizer,
        include_usage=usage,
        rings=answer,
        service_tier=tier,
        logprobs=logprobs,
        prompts=prompts,
        tokens_as_ids=record.tokens_as_ids,
        ids=ids,
    )
    return shown_as_asked(shape, record, tokenizer)


def prompt_list(answer: Answer, tokenizer: Tokenizer) -> PromptList | None:
    """Log probabilities of the prompts, where they are shown in a list."""
    top = answer.record.prompt_logprobs
    return PromptList([item.request for item in answer.generations], top, tokenizer) if top >= 0 else None


def shown_as_asked(shape: Format, record: GenerationRecord, tokenizer: Tokenizer) -> Format:
    """`shape` with the prompts and the best candidates, where the request asked for them."""
    if not record.best and not record.echo:
        return shape

    @cache
    def prompt(number: int) -> EchoedPrompt:
        return EchoedPrompt(record.requests[number], tokenizer)

    return Shown(shape, record.choices, record.best, record.hide_logprobs, prompt if record.echo else None)


MAX_EVENTS = 2**31


class GenerationState(msgspec.Struct, frozen=True):
    """What GET /v1/generations/{id} answers."""

    id: str
    object: str
    created: int
    model: str
    endpoint: str
    status: str
    """queued, in_progress, completed, failed or cancelled."""
    position: str
    """What `Last-Event-ID` continues after `response`."""
    error: ErrorDetail | None
    response: msgspec.Raw
    """The endpoint's response as far as it has come; a choice that goes on has no finish reason."""


class Runs:
    """Runs that read answers, in their model's tokens."""

    def __init__(self, catalog: Catalog, tokenizers: TokenizerStore) -> None:
        self._catalog = catalog
        self._tokenizers = tokenizers

    async def open(
        self, answer: Answer, owner: Owner, after: Sequence[int] | None = None, view: View | None = None
    ) -> Run:
        """As `new_run`. Raises `UnknownModel`, `Unavailable`."""
        card = self._catalog.card(answer.record.requests[0].model)
        tokenizer = await self._tokenizers.get(card)
        return new_run(answer, tokenizer, owner, after=after, view=view)

    async def shown(self, answer: Answer, owner: Owner) -> tuple[bytes, bool]:
        """The endpoint's response as far as it has come, and whether that is the whole. Raises as `open`."""
        run = await self.open(answer, owner)
        run.join()
        try:
            return await run.current(), run.finished
        finally:
            run.close()

    async def watch(self, answer: Answer, owner: Owner) -> None:
        """Reads an answer that nobody listens to, so that a stop string ends it."""
        run = await self.open(answer, owner)
        await run.watch()


class Reading:
    """The same for REST and WebSocket."""

    def __init__(
        self,
        answers: Answers,
        runs: Runs,
        metrics: GatewayMetrics,
        is_deleted: Callable[[str, str], Awaitable[bool]],
    ) -> None:
        """`is_deleted`: whether the answer of that identity and tenant, which the journal still has, is gone for
        clients."""
        self._answers = answers
        self._runs = runs
        self._metrics = metrics
        self._is_deleted = is_deleted

    async def attach(
        self,
        public_id: str,
        after: Sequence[int] | None,
        *,
        how: str = "id",
        view: View | None = None,
        tenant: str = "",
    ) -> Run:
        """A reading that has begun, behind the positions `after`; None: from the beginning.

        `how` it was found is for the metrics: `id`, `idempotency`, `websocket` or `grpc`. Raises `RouteError`
        for an unknown id or one of another tenant, `InvalidParameter` for positions that do not fit, `Unavailable`.
        """
        answer = await self._find(public_id, tenant)
        if after is not None:
            cursor.check(after, _ends(answer))
        run = await self._runs.open(answer, self._answers, after, view)
        run.join()
        self._metrics.attached.labels(how if after is None else f"{how}_resumed").inc()
        return run

    async def state(self, public_id: str, request_id: str, tenant: str = "") -> GenerationState:
        """Raises as `attach`."""
        answer = await self._find(public_id, tenant)
        run = await self._runs.open(answer, self._answers)
        run.join()
        try:
            response = await run.current()
        finally:
            run.close()
        record = answer.record
        error = next((item.error for item in answer.generations if item.error is not None), None)
        shown = error if error is not None and not run.finished else None
        return GenerationState(
            id=answer.public_id,
            object="generation",
            created=int(record.created),
            model=record.requests[0].model,
            endpoint=record.endpoint,
            status=_status(answer, run),
            position=run.position,
            error=None if shown is None else describe(shown, request_id).error,
            response=msgspec.Raw(response),
        )

    async def cancel(self, public_id: str, tenant: str = "") -> tuple[Answer, bool]:
        """Ends the generation, for everybody; False when it had ended before. Raises as `attach`."""
        answer = await self._find(public_id, tenant)
        going = not answer.ended
        self._answers.cancel(answer)
        return answer, going

    async def over(self, answer: Answer) -> bool:
        """Whether the answer has an end that is none to show again: an error before its text was complete."""
        if not answer.failed:
            return False
        run = await self._runs.open(answer, self._answers)
        run.join()
        try:
            run.snapshot()
            return not run.finished
        finally:
            run.close()

    async def _find(self, public_id: str, tenant: str) -> Answer:
        """Another tenant's is answered as if it were not there."""
        identity = parse(public_id)
        if identity is None:
            raise unknown_generation(public_id)
        answer = await self._answers.find(public_id, identity, tenant)
        if answer.record.tenant != tenant:
            raise unknown_generation(public_id)
        if answer.record.outlives and await self._is_deleted(identity, tenant):
            raise unknown_generation(public_id)
        return answer


def _ends(answer: Answer) -> list[int]:
    """Tokens of each choice: those it has, or may have at most while it goes on."""
    if answer.record.endpoint == "responses":
        return [
            MAX_EVENTS
        ]  # its positions are numbers of events, which the reader compares with what there are
    return [len(item.tokens) if item.ended else item.request.max_tokens for item in answer.generations]


def _status(answer: Answer, run: Run) -> str:
    if run.finished:
        return "completed"
    states = {generation.state for generation in answer.generations}
    for state in ("failed", "cancelled"):
        if state in states:
            return state
    return "in_progress" if any(generation.tokens for generation in answer.generations) else "queued"
