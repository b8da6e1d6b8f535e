"""One connection's reading of a response: from the log to numbered events, or to the whole object."""

import time
from collections.abc import AsyncGenerator

import msgspec

from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import ErrorBody, status_of
from services.gateway.dialects.responses.stream.events import ResponseEvents, ResponseStreamEvent
from services.gateway.dialects.responses.stream.items import ResponseShape
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.formats import padded
from services.gateway.streams.numbered_reader import NumberedReader
from services.gateway.streams.output import OutputDelta
from services.gateway.streams.progress import PromptProgress
from services.gateway.streams.stream_reader import Write
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.errors import RyzansteinError

_json = msgspec.json.Encoder()
# The type of an event that OpenAI's API has not: named as Open Responses has extensions named, by who makes them.
PROGRESS = "ryzanstein:prompt_progress"


class ResponseEventReader(NumberedReader):
    """As `Run`; a position is the number of an event."""

    resumed_by = "starting_after"
    _events: ResponseEvents

    _failed = False

    def _begun_events(self, answer: RequestState, tokenizer: Tokenizer) -> ResponseEvents:
        self.obfuscated = answer.record.obfuscate
        events = ResponseEvents(ResponseShape(answer.record, tokenizer))
        events.created()
        return events

    @property
    def background(self) -> bool:
        """Whether the request is answered before the response has ended."""
        response = self.answer.record.response
        return response is not None and response.background

    @property
    def over(self) -> bool:
        """Whether its last event is known."""
        return self.finished or self._failed

    async def chunks(self, write: Write | None = None) -> AsyncGenerator[list[StreamChunk], None]:
        """Events as they come: the first at once, as soon as the record is durable. An error that the log
        knows of is an event; raises `ClientGone`, and errors of this reading alone."""
        await self._until_stored()
        while True:
            batch = self._take_unwritten()
            self._append(batch, 0)
            batch += self._progress()
            if batch:
                yield batch
                if self._since and self._metrics is not None:
                    self._metrics.delivery.observe(time.perf_counter() - self._since)
                if write is not None:
                    self._feed_at_once(write)
            if self.over:
                break
            try:
                await self._advance()
            except RyzansteinError as error:
                self._end_with(error)
        self._check_known()

    async def collect(self) -> bytes:
        """The whole object; of a background response, as it begins, and for a repeat as it is now. Raises the
        error that ended it."""
        if self.background and self.stream is False:
            made_here = self._stored is not None
            await self._until_stored()
            return self._whole() if made_here else self.snapshot()
        while not self.over:
            try:
                await self._advance()
            except RyzansteinError as error:
                if self.answer.generations[0].state != "cancelled":
                    raise
                self._end_with(error)
        await self._until_stored()
        return self._whole()

    def snapshot(self) -> bytes:
        here, self._news = self._news, []
        for _, news in here:
            if isinstance(news, RyzansteinError):
                if self.answer.ended and not self.over:
                    self._end_with(news)
            elif not self.over:
                self._feed(0, news)
        return self._whole()

    def error_event(self, described: object) -> object:
        """OpenAI's, with the number of the last event before it: behind that one a client goes on elsewhere."""
        assert isinstance(described, ErrorBody)
        told = described.error
        about = {"code": told.code, "message": told.message, "param": told.param}
        return {"type": "error", "sequence_number": self._events.count - 1, **about}

    # --- inside ----------------------------------------------------------------------------------

    def _progress_chunk(self, progress: PromptProgress) -> StreamChunk:
        """With the number of the last event before it, as errors have it."""
        body = {"type": PROGRESS, "sequence_number": self._events.count - 1, "prompt_progress": progress}
        return StreamChunk(_json.encode(body), b"", PROGRESS.encode())

    def _show(self, piece: OutputDelta) -> None:
        self._events.begin()
        if not self._events.silent:
            self._show_piece(piece)
        if self._output.finish:
            self._events.finish(self._output.finish, self._usage())

    def _show_piece(self, piece: OutputDelta) -> None:
        """More of a call that has begun, then the rest."""
        events = self._events
        if piece.reasoning:
            events.reasoning_tokens = self._output.tokens
        for call in piece.calls:
            if not call.id:
                events.arguments(call.arguments)
        events.reasoning(piece.reasoning)
        events.text(piece.text, piece.scored)
        for call in piece.calls:
            if call.id:
                events.call(call.id, call.name, custom=call.custom)
                events.arguments(call.arguments)

    def _end_with(self, error: RyzansteinError) -> None:
        """Raises `error` when it is of this reading alone, and the response goes on without it."""
        state = self.answer.generations[0].state
        if state not in ("failed", "cancelled"):
            raise error
        self._failed = True
        self._events.begin()
        if state == "cancelled":
            self._events.cancel(self._usage())
        else:
            code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
            self._events.fail({"code": code, "message": error.message}, self._usage())

    def _append(self, batch: list[StreamChunk], index: int) -> None:
        """The new events that the client does not have."""
        for event in self._events.take():
            if event.number > self._known:
                batch.append(_chunk(event, padding=self.obfuscated))

    def _whole(self) -> bytes:
        return _json.encode(self._events.response())


def _chunk(event: ResponseStreamEvent, *, padding: bool) -> StreamChunk:
    body = _json.encode({"type": event.type, "sequence_number": event.number, **event.body})
    if padding and event.type.endswith(".delta"):
        body = padded(body)
    return StreamChunk(body, b"%d" % event.number, event.type.encode())
