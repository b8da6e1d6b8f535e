"""Generations by their id, whoever took them in: read from their beginning or from where a client stands, looked at,
cancelled.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import msgspec

from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import ErrorDetail, RouteError, describe
from services.gateway.core.metrics import GatewayMetrics, ModelMetrics
from services.gateway.lifecycle.request_state import RequestState, parse
from services.gateway.lifecycle.request_tracker import RequestTracker, unknown_generation
from services.gateway.streams import cursor
from services.gateway.streams.embeddings import VectorFormat
from services.gateway.streams.formats import ChatFormat, CompletionFormat, EchoFormat, ResponseSerializer
from services.gateway.streams.numbered_reader import NumberedReader
from services.gateway.streams.progress import tell_progress
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.store import TokenizerStore
from services.gateway.tokenizer.tokenizer import Tokenizer

View = Callable[[RequestState, Tokenizer], ResponseSerializer]  # how a reader sees an answer
# How an endpoint shows its answers: a view; or as events whose positions are their numbers.
Presentation = type[ResponseSerializer] | type[NumberedReader]
# Of what all other endpoints' requests become.
CANONICAL: Mapping[str, Presentation] = {
    "chat.completions": ChatFormat,
    "completions": CompletionFormat,
    "embeddings": VectorFormat,
}


class Presentations:
    """How answers are shown, by the endpoint that began them."""

    def __init__(self, listed: Mapping[str, Presentation] = MappingProxyType({})) -> None:
        self._views: dict[str, Any] = {**CANONICAL, **listed}
        self._numbered = frozenset(name for name, one in self._views.items() if issubclass(one, NumberedReader))

    def numbers(self, answer: RequestState) -> bool:
        """Whether positions in it are numbers of events."""
        return answer.record.endpoint in self._numbered

    def run(
        self,
        answer: RequestState,
        tokenizer: Tokenizer,
        answers: RequestTracker | None,
        *,
        metrics: ModelMetrics | None = None,
        after: Sequence[int] | None = None,
        view: View | None = None,
    ) -> StreamReader:
        """`metrics`: where its tokens are counted, None for what was counted before. `after`: the client's
        positions; None: it has seen nothing. `view`: None for the format of its endpoint. Raises `RouteError` where
        that is not served here."""
        if view is not None:
            return StreamReader(answer, view(answer, tokenizer), answers, metrics, after=after, as_recorded=False)
        record = answer.record
        if (made := self._views.get(record.endpoint)) is None:
            raise RouteError(
                f"The generation was begun over an API that is not served here ('{record.endpoint}').",
                reason="unsupported_endpoint",
            )
        if record.endpoint in self._numbered:
            events: StreamReader = made(answer, tokenizer, answers, metrics, after=after)
            return events
        shape = made(answer, tokenizer)
        if record.best or record.echo:
            shape = EchoFormat(shape, answer, tokenizer)
        return StreamReader(answer, shape, answers, metrics, after=after)


MAX_EVENTS = 2**31


class GenerationState(msgspec.Struct, frozen=True):
    """What GET /v1/generations/{id} answers."""

    id: str
    object: str
    created: int
    model: str
    endpoint: str
    status: str  # queued, in_progress, completed, failed or cancelled
    position: str  # what `Last-Event-ID` continues after `response`
    error: ErrorDetail | None
    # The endpoint's response as far as it has come; a choice that goes on has no finish reason.
    response: msgspec.Raw


class Runs:
    """Runs that read answers, in their model's tokens."""

    def __init__(self, catalog: Catalog, tokenizers: TokenizerStore, presentations: Presentations) -> None:
        self.presentations = presentations
        self._catalog = catalog
        self._tokenizers = tokenizers

    async def open(
        self,
        answer: RequestState,
        answers: RequestTracker | None,
        after: Sequence[int] | None = None,
        view: View | None = None,
    ) -> StreamReader:
        """As `Presentations.run`. Raises `RouteError`, `UnknownModel`, `Unavailable`."""
        card = self._catalog.card_of_record(answer.record.requests[0].model)
        tokenizer = await self._tokenizers.get(card)
        return self.presentations.run(answer, tokenizer, answers, after=after, view=view)

    @asynccontextmanager
    async def reading(self, answer: RequestState, answers: RequestTracker | None) -> AsyncIterator[StreamReader]:
        """A run that has begun, from the beginning. Raises as `open`."""
        run = await self.open(answer, answers)
        run.join()
        try:
            yield run
        finally:
            run.close()

    async def response(self, answer: RequestState, answers: RequestTracker | None) -> tuple[bytes, bool]:
        """The endpoint's response as far as it has come, and whether that is the whole. Raises as `open`."""
        async with self.reading(answer, answers) as run:
            return await run.current(), run.finished

    async def watch(self, answer: RequestState, answers: RequestTracker | None) -> None:
        """Reads an answer that nobody listens to, so that a stop string ends it."""
        await (await self.open(answer, answers)).watch()


class Reading:
    """The same for REST and WebSocket."""

    def __init__(
        self,
        answers: RequestTracker,
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
    ) -> StreamReader:
        """A reading that has begun, behind the positions `after`; None: from the beginning.

        `how` it was found is for the metrics: `id`, `idempotency`, `websocket` or `grpc`. Raises `RouteError`
        for an unknown id or one of another tenant, `InvalidParameter` for positions that do not fit, `Unavailable`.
        """
        answer = await self._find(public_id, tenant)
        if after is not None:
            cursor.check(after, self._ends(answer))
        run = await self._runs.open(answer, self._answers, after, view)
        run.join()
        self._metrics.attached.labels(how if after is None else f"{how}_resumed").inc()
        return run

    async def state(
        self, public_id: str, request_id: str, tenant: str, headers: MutableMapping[str, str]
    ) -> GenerationState:
        """`headers`, of the reply, tell how much of its prompts is computed. Raises as `attach`."""
        answer = await self._find(public_id, tenant)
        tell_progress(headers, answer, time.time())
        async with self._runs.reading(answer, self._answers) as run:
            response = await run.current()
        record = answer.record
        errors = [item.error for item in answer.generations if item.error is not None and not run.finished]
        return GenerationState(
            id=answer.public_id,
            object="generation",
            created=int(record.created),
            model=record.model_shown,
            endpoint=record.endpoint,
            status=_status(answer, run),
            position=run.position,
            error=describe(errors[0], request_id).error if errors else None,
            response=msgspec.Raw(response),
        )

    async def cancel(self, public_id: str, tenant: str = "") -> tuple[RequestState, bool]:
        """Ends the generation, for everybody; False when it had ended before. Raises as `attach`."""
        answer = await self._find(public_id, tenant)
        going = not answer.ended
        self._answers.cancel(answer)
        return answer, going

    async def over(self, answer: RequestState) -> bool:
        """Whether the answer has an end that is none to show again: an error before its text was complete."""
        if not answer.failed:
            return False
        async with self._runs.reading(answer, self._answers) as run:
            run.snapshot()
            return not run.finished

    def _ends(self, answer: RequestState) -> list[int]:
        """Tokens of each choice: those it has, or may have at most while it goes on."""
        if self._runs.presentations.numbers(answer):
            return [MAX_EVENTS]  # positions are numbers of events, which the reader compares with what there are
        return [len(item.tokens) if item.ended else item.request.max_tokens for item in answer.generations]

    async def _find(self, public_id: str, tenant: str) -> RequestState:
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


def _status(answer: RequestState, run: StreamReader) -> str:
    if run.finished:
        return "completed"
    states = {generation.state for generation in answer.generations}
    for state in ("failed", "cancelled"):
        if state in states:
            return state
    return "in_progress" if any(generation.tokens for generation in answer.generations) else "queued"
