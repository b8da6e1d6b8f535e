"""One connection's reading of an answer: its choices, from the log to chunks or to a whole response."""

import asyncio
import contextvars
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import ClassVar

import msgspec
import structlog

from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import ClientGone, InvalidParameter
from services.gateway.core.metrics import ModelMetrics
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.streams.cursor import END_OF_CHOICE, END_OF_TEXT, show
from services.gateway.streams.formats import PredictionTally, ResponseSerializer, Usage, padded, with_usage
from services.gateway.streams.output import OutputDelta, OutputProcessor
from services.gateway.streams.progress import PromptProgress, progress_of
from shared.errors import RyzansteinError
from shared.messages import TokenEntry
from shared.sparse_attention import NO_SPARSE, SparseTokens, sparse_tokens

# Bytes of vectors and of prompts' log probabilities from which they are turned into text beside the event loop.
LARGE = 32 << 10
AT_ONCE = 32  # news that are turned into text before others get their turn


# Writes chunks to the connection at once; False: it cannot now, and has written nothing.
Write = Callable[[Sequence[StreamChunk]], bool]


class StreamReader:
    """Read once, by `chunks` or `collect`; `close` at the end, whatever happened.

    Many generations put, one reader takes everything there is at once: one that is slow (its client is) finds several
    entries and makes one write of them, so nothing grows but the tokens themselves, and those are bounded by the
    request.
    """

    ends_with_done: ClassVar[bool] = True  # whether a stream of server-sent events ends with `[DONE]`

    __slots__ = (  # thousands wait at once
        "_after",
        "_answers",
        "_arrivals",
        "_backlog",
        "_began",
        "_begun",
        "_bulk",
        "_computing",
        "_context",
        "_ended",
        "_error",
        "_in_chunks",
        "_joined",
        "_metrics",
        "_more",
        "_news",
        "_news_at",
        "_open",
        "_outputs",
        "_plain",
        "_progressed",
        "_scheduled",
        "_shape",
        "_shown",
        "_since",
        "_stored",
        "_submitted",
        "_tallies",
        "_unwritten",
        "_waiter",
        "_write",
        "answer",
    )

    def __init__(
        self,
        answer: RequestState,
        shape: ResponseSerializer,
        answers: RequestTracker | None,
        metrics: ModelMetrics | None,
        *,
        after: Sequence[int] | None = None,
        as_recorded: bool = True,
    ) -> None:
        """`answers`: where it is known; None: it is kept, and has ended. `as_recorded`: whether chunks are JSON with
        what the record asks for beside the text."""
        self.answer = answer
        self._shape = shape
        self._outputs = outputs = shape.outputs
        record = answer.record
        self._more = as_recorded and (record.continuous_usage or record.obfuscate)
        # Whether its chunks are the text of a single choice, and positions alone.
        self._plain = len(outputs) == 1 and outputs[0].text_alone and not self._more
        # Whether chunks tell how much of the prompts is computed; a view of its own knows that by itself.
        self._in_chunks = record.return_progress or not as_recorded
        self._answers = answers
        self._metrics = metrics
        # Positions that the client has reached already: what leads there is read in silence.
        self._after = list(after) if after is not None else [0] * len(outputs)
        self._begun = [after is not None and (len(outputs) == 1 or position > 0) for position in self._after]
        self._shown = list(self._after)  # positions behind the chunks made so far
        # Of each choice, where there is a prediction and its usage was asked for.
        self._tallies: list[PredictionTally] | None = None
        self._open = len(outputs)
        self._began = time.perf_counter()
        self._arrivals: dict[int, float] = {}  # when the last tokens of each choice came
        # New tokens of a choice, or the error that ended it; what nobody has taken yet.
        self._news: list[tuple[int, TokenEntry | RyzansteinError]] = []
        self._news_at = 0.0  # when the first of them was put (`time.perf_counter`)
        # Whether it was told how much of a prompt is computed, and nobody has taken that yet.
        self._computing = False
        self._progressed = False  # whether it is to be shown
        self._waiter: asyncio.Future[None] | None = None
        # The reader's, once ordinary tokens do not wake its task.
        self._context: contextvars.Context | None = None
        self._write: Write | None = None  # where what they bring is written then
        self._scheduled = False  # whether `_feed_ordinary` is about to be called
        self._unwritten: list[StreamChunk] = []  # what it has made and could not write
        self._ended: BaseException | None = None  # why nothing more is read
        self._backlog: list[tuple[int, TokenEntry | RyzansteinError]] = []
        self._error: Exception | None = None
        self._stored: asyncio.Future[None] | None = None
        self._joined = False
        self._submitted = False
        self._bulk = 0  # bytes of vectors and of prompts' log probabilities that have come
        self._since = 0.0  # when what was taken last had come

    @property
    def model(self) -> str:
        return self.answer.record.requests[0].model

    @property
    def stream(self) -> bool:
        return self.answer.record.stream

    def put(self, choice: int, news: TokenEntry | RyzansteinError) -> None:
        """What generations give it (`Deliver`)."""
        ordinary = False
        if isinstance(news, TokenEntry) and news.computed:
            self._computing = True
        else:
            if not self._news:
                self._news_at = time.perf_counter()
            self._news.append((choice, news))
            ordinary = isinstance(news, TokenEntry) and not (news.finish or news.prompt_scores or news.vector)
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if not ordinary or self._context is None or self._bulk > LARGE:
            waiter.set_result(None)
        elif not self._scheduled:
            self._scheduled = True
            waiter.get_loop().call_soon(self._feed_ordinary, context=self._context)

    def end(self, reason: BaseException) -> None:
        """Lets the reader fail with `reason`, now and from now on."""
        self._ended = reason
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)

    def client_gone(self) -> None:
        """Lets the reader fail with `ClientGone`."""
        self.end(ClientGone())

    async def begin(self, *, record_first: bool = False) -> None:
        """Hands the generations in, unless this is a reading that has joined; with `record_first` not before the
        record is durable. Raises what `RequestTracker.submit` raises."""
        if not self._joined:
            assert self._answers is not None, "an answer that has ended was handed in long ago"
            self.join()
            self._stored = await self._answers.submit(self.answer, record_first=record_first)
            self._submitted = True

    async def watch(self) -> None:
        """Reads to the end for nobody: it does not count as a reader, and nothing is shown."""
        for generation in self.answer.generations:
            generation.attach(self.put)
        try:
            await self.collect()
        except RyzansteinError:
            return  # there is nothing left to watch
        finally:
            for generation in self.answer.generations:
                generation.detach(self.put)

    def join(self) -> None:
        """Begins to read, from the first token. Raises `QueueFull`."""
        if self._answers is not None:
            self._answers.join(self.answer, self.put)
        else:
            for generation in self.answer.generations:
                generation.attach(self.put)
        self._joined = True
        structlog.contextvars.bind_contextvars(generation_id=self.answer.record.identity)

    def cancel(self) -> None:
        """Ends the generation, for everybody who reads it, if it has begun."""
        if self._joined and self._answers is not None:
            self._answers.cancel(self.answer)

    def close(self) -> None:
        """Ends the reading; what becomes of the generation is its owner's to decide."""
        if self._joined:
            self._joined = False
            if self._answers is not None:
                self._answers.leave(self.answer, self.put)
        if self._metrics is None:
            return
        if self._submitted:
            self._submitted = False
            self._count_end(self._metrics)
        if self._arrivals:  # some token has come
            usage = self._usage()
            if (trace := self.answer.trace) is not None:
                trace.delivered(streamed=self.stream, tokens=usage.completion_tokens)
            usage.count(self._metrics)

    async def chunks(self, write: Write | None = None) -> AsyncGenerator[list[StreamChunk], None]:
        """Chunks as they come, several at a time. Those of ordinary tokens are given to `write` instead, where there is
        one, for as long as it can: that spares their reader's task a turn for each token.

        Raises the error that ended a choice, or `ClientGone`; `InvalidParameter` where only the end shows which
        choices are wanted."""
        self._check_streamed()
        while self._open:
            changed = await self._advance()
            batch = self._take_unwritten()
            told = bool(batch or changed)
            if self._progressed:
                batch += self._progress()
            for index in changed:
                if self._bulk > LARGE:
                    await asyncio.to_thread(self._append, batch, index)
                else:
                    self._append(batch, index)
            if not self._open and self.answer.record.include_usage:
                batch.append(StreamChunk(self._shape.usage(self._usage()), show(self._shown)))
            if batch:
                if self._stored is not None:
                    await self._until_stored()
                yield batch
                if told and self._metrics is not None:  # it has been handed to the connection
                    self._metrics.delivery.observe(time.perf_counter() - self._since)
                if write is not None:
                    self._feed_at_once(write)

    def _check_streamed(self) -> None:
        """Raises `InvalidParameter`."""
        if self.answer.record.best:
            raise InvalidParameter(
                "Which candidates of 'best_of' are the best is known at their end, so they cannot be streamed; "
                "GET /v1/generations/{id} instead.",
                param="best_of",
            )
        if self.answer.generations[0].request.pools:
            raise InvalidParameter(
                "Embeddings and scores are not streamed; GET /v1/generations/{id} instead.", param=None
            )

    def _feed_at_once(self, write: Write | None) -> None:
        """From now on ordinary tokens do not wake the reader's task."""
        if self._context is None:
            self._write, self._context = write, contextvars.copy_context()

    def _feed_ordinary(self) -> None:
        """Feeds ordinary tokens and writes what they bring, while the reader's task waits on. It is woken for
        everything else: an end, an error, more than is taken at once, and what cannot be written now."""
        self._scheduled = False
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # the task takes them
        try:
            if self._write is None:
                self._feed_news()
            elif not (self._plain and self._write_text(self._write)):
                self._write_news(self._write)
        except Exception as error:
            self._error = error
        if not self._open or self._unwritten or self._backlog or self._error is not None:
            waiter.set_result(None)

    def _write_text(self, write: Write) -> bool:
        """What nearly all news are: an entry of a choice of which others were shown and counted. False: they are not,
        and nothing was done."""
        metrics, last, output = self._metrics, self._arrivals.get(0), self._outputs[0]
        if metrics is None or last is None or not self._begun[0] or self._ended is not None:
            return False
        if len(self._news) > 1 or self._backlog or output.tokens < self._after[0]:
            return False
        self._since = self._arrivals[0] = now = self._news_at
        metrics.between_tokens.observe(now - last)
        _, entry = self._news.pop()
        assert isinstance(entry, TokenEntry), "an error wakes the task"
        output.feed(entry)
        text = output.texts[0] if len(output.texts) == 1 else "".join(output.texts)
        output.texts.clear()
        if text:
            self._shown[0] = output.tokens
            chunks = [self._text_chunk(text)]
            if write(chunks):
                metrics.delivery.observe(time.perf_counter() - now)
            else:
                self._unwritten = chunks
        return True

    def _text_chunk(self, text: str) -> StreamChunk:
        """More text of a plain choice."""
        return StreamChunk(self._shape.text(0, text), b"%d" % self._outputs[0].tokens)

    def _write_news(self, write: Write) -> None:
        """Of any run."""
        batch: list[StreamChunk] = []
        for index in self._feed_news():
            self._append(batch, index)
        if batch and not write(batch):
            self._unwritten = batch
        elif batch and self._metrics is not None:
            self._metrics.delivery.observe(time.perf_counter() - self._since)

    def _take_unwritten(self) -> list[StreamChunk]:
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def _progress(self) -> list[StreamChunk]:
        """What was told of the prompts, as a comment, and as a chunk where the client wants some."""
        self._progressed = False
        progress = progress_of(self.answer, time.time())
        if progress is None:
            return []
        told = [StreamChunk(msgspec.json.encode(progress), b"", comment=f"prompt {progress.header}".encode())]
        if self._in_chunks and (chunk := self._progress_chunk(progress)) is not None:
            told.append(chunk)
        return told

    def _progress_chunk(self, progress: PromptProgress) -> StreamChunk | None:
        """`progress` as the format tells it, which has no position."""
        data = self._shape.progress(progress)
        return None if data is None else StreamChunk(data, b"")

    async def _until_stored(self) -> None:
        """A client that has an id can come back: its record must be there then."""
        if self._stored is None:
            return
        try:
            await asyncio.shield(self._stored)
        except RyzansteinError:
            self.cancel()
            raise
        self._stored = None

    def _append(self, batch: list[StreamChunk], index: int) -> None:
        """The news of one choice, as chunks."""
        output = self._outputs[index]
        if output.text_alone and self._begun[index] and not output.finish:  # nearly always
            text = output.texts[0] if len(output.texts) == 1 else "".join(output.texts)
            output.texts.clear()
            if text:
                self._shown[index] = output.tokens
                batch.append(self._chunk(self._shape.text(index, text)))
            return
        piece = output.take()
        if not self._begun[index]:
            self._begun[index] = True
            if (first := self._shape.first(index)) is not None:
                batch.append(self._chunk(first))
        position, finish = output.tokens, output.finish
        has_text = piece.text or piece.reasoning or piece.calls or piece.tokens or piece.prompt is not None
        if has_text or ((piece.scored or piece.ids) and not finish):
            self._shown[index] = position + END_OF_TEXT if finish else position
            batch.append(self._chunk(self._shape.delta(index, piece)))
            piece = OutputDelta("", ())
        if finish and self._after[index] < position + END_OF_CHOICE:
            self._shown[index] = position + END_OF_CHOICE
            piece = piece._replace(finish=finish, stop_reason=output.stop_reason)
            batch.append(self._chunk(self._shape.last(index, piece)))

    def _chunk(self, data: bytes) -> StreamChunk:
        """`data` with what its record asks for beside the text."""
        if self._more:
            if self.answer.record.continuous_usage:
                data = with_usage(data, self._usage())
            if self.answer.record.obfuscate:
                data = padded(data)
        return StreamChunk(data, show(self._shown))

    async def collect(self) -> bytes:
        """The whole response. Raises the error that ended a choice, or `ClientGone`."""
        self._feed_at_once(None)
        while self._open:
            await self._advance()
        await self._until_stored()
        return await asyncio.to_thread(self._whole) if self._bulk > LARGE else self._whole()

    def snapshot(self) -> bytes:
        """The response as far as it has come; a choice that goes on has no finish reason."""
        self._catch_up()
        return self._whole()

    async def current(self) -> bytes:
        """`snapshot`, beside the event loop where that takes long."""
        if sum(len(item.prompt_scores) + len(item.vector) for item in self.answer.generations) <= LARGE:
            return self.snapshot()
        self._catch_up()
        return await asyncio.to_thread(self._whole)

    def _catch_up(self) -> None:
        """Feeds what there is."""
        news_here, self._news = self._news, []
        for choice, news in news_here:
            if isinstance(news, TokenEntry) and not self._outputs[choice].finish:
                self._feed(choice, news)

    def error_event(self, described: object) -> object:
        """`described`, an error in the API's shape, as an event of this stream: it is of this reading, and not of the
        log."""
        return described

    @property
    def finished(self) -> bool:
        """Whether the text of every choice has ended."""
        return not self._open

    @property
    def position(self) -> str:
        """Where a reader of `snapshot` stands."""
        ends = (output.tokens + (END_OF_CHOICE if output.finish else 0) for output in self._outputs)
        return show(list(ends)).decode()

    def _whole(self) -> bytes:
        choices = [output.whole(number) for number, output in enumerate(self._outputs)]
        return self._shape.whole(choices, self._usage())

    async def _advance(self) -> list[int]:
        """Feeds what has come; returns the choices that have news, in order.

        An error is raised once the tokens that came before it have been shown.
        """
        if self._error is not None:
            raise self._error
        if self._backlog:
            await asyncio.sleep(0)
        elif not self._news and not self._computing and self._ended is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._progressed, self._computing = self._computing, False
        return self._feed_news()

    def _feed_news(self) -> list[int]:
        """As `_advance`, of what is there."""
        news = self._backlog
        if not news:
            if self._ended is not None:
                raise self._ended
            news, self._news, self._since = self._news, [], self._news_at
        if len(news) > AT_ONCE:  # a long log that is read again does not keep the others waiting
            news, self._backlog = news[:AT_ONCE], news[AT_ONCE:]
        elif self._backlog:
            self._backlog = []
        changed: list[int] = []
        for choice, item in news:
            if self._outputs[choice].finish:
                continue
            if isinstance(item, RyzansteinError):
                if not changed:
                    raise item
                self._error = item
                break
            self._feed(choice, item)
            if choice not in changed:
                changed.append(choice)
        return changed

    def _feed(self, choice: int, entry: TokenEntry) -> None:
        output = self._outputs[choice]
        if self._metrics is not None and (entry.tokens or entry.vector or entry.prompt_scores):
            self._observe(choice, self._metrics)
        self._bulk += len(entry.prompt_scores) + len(entry.vector)
        if output.tokens < self._after[choice]:
            entry = self._feed_in_silence(output, entry, self._after[choice] - output.tokens)
        output.feed(entry)
        if output.finish:
            self._open -= 1
            if self._answers is not None:
                self._answers.end_choice(self.answer, choice)

    def _feed_in_silence(self, output: OutputProcessor, entry: TokenEntry, known: int) -> TokenEntry:
        """Feeds the `known` positions that the client has, without their text; returns the rest of `entry`."""
        if known > len(entry.tokens):
            silent, rest = entry, msgspec.structs.replace(entry, tokens=[], logprobs=None, finish="")
        else:
            silent, rest = _split(entry, known)
        output.feed(silent)
        output.take()
        return rest

    def _observe(self, choice: int, metrics: ModelMetrics) -> None:
        now, last = self._since, self._arrivals.get(choice)
        if last is not None:
            metrics.between_tokens.observe(now - last)
        elif not self._arrivals:
            first = self.answer.record.requests[0]
            if first.lane != "batch" and not first.prefill:  # they wait their turn
                metrics.first_token.observe(now - self._began)
            if (trace := self.answer.trace) is not None:
                trace.first_token()
        self._arrivals[choice] = now

    def _count_end(self, metrics: ModelMetrics) -> None:
        """Each choice by the reason of its end; and, where all have come to theirs, how long that took."""
        whole = True
        for generation, output in zip(self.answer.generations, self._outputs, strict=True):
            metrics.ended(output.finish, failed=generation.state == "failed")
            whole = whole and bool(output.finish)
        if whole:
            metrics.generation.observe(time.perf_counter() - self._began)

    def _usage(self) -> Usage:
        prompts, cached = self.answer.prompt_tokens
        tokens = sum([output.tokens for output in self._outputs])
        prediction = self.answer.generations[0].request.prediction
        predicted = self._predictions(prediction) if prediction else (0, 0)
        sparse = self._sparse() if self.answer.generations[0].request.sparse is not None else NO_SPARSE
        return Usage.of(prompts, tokens, cached, *predicted, sparse)

    def _sparse(self) -> SparseTokens:
        """Tokens that have not read everything before them; each prompt counts once."""
        prompts: dict[int, int] = {}
        outputs = 0
        for generation, output in zip(self.answer.generations, self._outputs, strict=True):
            request = generation.request
            found = sparse_tokens(request.sparse, len(request.prompt), output.tokens)
            prompts[id(request.prompt)] = found.prompt
            outputs += found.output
        return SparseTokens(sum(prompts.values()), outputs)

    def _predictions(self, prediction: Sequence[int]) -> tuple[int, int]:
        """Tokens of the prediction that came, and that did not, over all choices."""
        generations = self.answer.generations
        if self._tallies is None:
            expected = Counter(prediction)
            self._tallies = [PredictionTally(expected) for _ in generations]
        came = sum(
            tally.came(generation.tokens, output.tokens)
            for tally, generation, output in zip(self._tallies, generations, self._outputs, strict=True)
        )
        return came, len(generations) * len(prediction) - came


def _split(entry: TokenEntry, at: int) -> tuple[TokenEntry, TokenEntry]:
    """`entry` in two; its finish belongs to the second."""
    scores = entry.logprobs
    first = msgspec.structs.replace(
        entry, tokens=entry.tokens[:at], logprobs=None if scores is None else scores[:at], finish=""
    )
    second = msgspec.structs.replace(
        entry, position=entry.position + at, tokens=entry.tokens[at:], logprobs=None if scores is None else scores[at:]
    )
    return first, second
