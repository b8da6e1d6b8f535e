"""Generations by their id, whoever took them in: read, looked at, cancelled."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from services.gateway.catalog import Catalog
from services.gateway.errors import ErrorDetail, describe
from services.gateway.life.answer import Answer
from services.gateway.life.answers import Answers, unknown_generation
from services.gateway.life.identity import parse
from services.gateway.metrics import GatewayMetrics
from services.gateway.readers import cursor
from services.gateway.readers.run import Run
from services.gateway.readers.runs import View, new_run
from services.gateway.text.tokenizer_store import TokenizerStore
from shared.messages.records import GenerationRecord

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


class Reading:
    """The same for REST and WebSocket."""

    def __init__(
        self, answers: Answers, catalog: Catalog, tokenizers: TokenizerStore, metrics: GatewayMetrics
    ) -> None:
        self._answers = answers
        self._catalog = catalog
        self._tokenizers = tokenizers
        self._metrics = metrics
        self.is_deleted: Callable[[GenerationRecord], Awaitable[bool]] | None = None
        """Whether a generation that the journal still has is gone for clients."""

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
        run = await self._run(answer, after, view)
        run.join()
        self._metrics.attached.labels(how if after is None else f"{how}_resumed").inc()
        return run

    async def state(self, public_id: str, request_id: str, tenant: str = "") -> GenerationState:
        """Raises as `attach`."""
        answer = await self._find(public_id, tenant)
        run = await self._run(answer, None)
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

    async def finished(self, answer: Answer) -> bytes | None:
        """The whole answer as JSON; None where it has not come to its end. Raises `Unavailable`, `UnknownModel`."""
        run = await self._run(answer, None)
        run.join()
        try:
            response = await run.current()
            return response if run.finished else None
        finally:
            run.close()

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
        run = await self._run(answer, None)
        run.join()
        try:
            run.snapshot()
            return not run.finished
        finally:
            run.close()

    async def shown(self, answer: Answer) -> bytes:
        """The endpoint's response as far as it has come."""
        run = await self._run(answer, None)
        run.join()
        try:
            return await run.current()
        finally:
            run.close()

    async def watch(self, answer: Answer) -> None:
        """Reads an answer that nobody listens to, so that a stop string ends it."""
        run = await self._run(answer, None)
        await run.watch()

    async def _find(self, public_id: str, tenant: str) -> Answer:
        """Another tenant's is answered as if it were not there."""
        identity = parse(public_id)
        if identity is None:
            raise unknown_generation(public_id)
        answer = await self._answers.find(public_id, identity, tenant)
        if answer.record.tenant != tenant:
            raise unknown_generation(public_id)
        if answer.record.outlives and self.is_deleted and await self.is_deleted(answer.record):
            raise unknown_generation(public_id)
        return answer

    async def _run(self, answer: Answer, after: Sequence[int] | None, view: View | None = None) -> Run:
        card = self._catalog.card(answer.record.requests[0].model)
        tokenizer = await self._tokenizers.get(card)
        return new_run(answer, tokenizer, self._answers, after=after, view=view)


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
