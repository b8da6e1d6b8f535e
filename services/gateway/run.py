"""One client's request under way: its choices, from the mailbox to chunks or to a whole response."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from services.gateway.formats import Choice, Format, Usage
from services.gateway.generation import Generation
from services.gateway.generations import Generations
from services.gateway.mailbox import Mailbox
from services.gateway.metrics import ModelMetrics
from services.gateway.text_output import Piece, ScoredToken, TextOutput
from shared.errors import RyzansteinError
from shared.messages import TokenEntry


class Chunk(NamedTuple):
    """A JSON text for the client."""

    data: bytes
    position: int | None
    """Where in the log a reader of everything up to this chunk may resume; None for more than one choice."""


class Run:
    """The choices of one request. Read once, by `chunks` or `collect`; `close` at the end, whatever happened."""

    def __init__(
        self,
        generations: Sequence[Generation],
        outputs: Sequence[TextOutput],
        mailbox: Mailbox,
        shape: Format,
        owner: Generations,
        metrics: ModelMetrics,
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self.mailbox = mailbox
        self.stream = stream
        self._generations = generations
        self._outputs = outputs
        self._shape = shape
        self._owner = owner
        self._metrics = metrics
        self._include_usage = include_usage
        self._begun = [False] * len(outputs)
        self._open = len(outputs)
        self._began = time.perf_counter()
        self._arrivals: dict[int, float] = {}
        """When the last tokens of each choice came."""
        self._error: RyzansteinError | None = None

    @property
    def model(self) -> str:
        return self._generations[0].request.model

    async def submit(self) -> None:
        """Hands the generations in. Raises what `Generations.submit` raises."""
        await self._owner.submit(self._generations)

    def close(self) -> None:
        """Cancels what has not ended."""
        self._owner.cancel(self._generations)
        if not self._arrivals:
            return  # no token has come
        usage = self._usage()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.output_tokens.inc(usage.completion_tokens)
        self._metrics.cached_tokens.inc(usage.prompt_tokens_details["cached_tokens"])

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Chunks as they come, several at a time. Raises the error that ended a choice, or `ClientGone`."""
        while self._open:
            batch: list[Chunk] = []
            for index in await self._advance():
                self._append(batch, index)
            if not self._open and self._include_usage:
                batch.append(self._chunk(self._shape.usage(self._usage())))
            if batch:
                yield batch

    def _chunk(self, data: bytes, *, shown: bool = True) -> Chunk:
        """`shown`: whether it comes with or after the text of the tokens fed so far, or before any text."""
        if len(self._outputs) > 1:
            return Chunk(data, None)
        return Chunk(data, self._outputs[0].position if shown else 0)

    def _append(self, batch: list[Chunk], index: int) -> None:
        """The news of one choice, as chunks."""
        output = self._outputs[index]
        piece = output.take()
        if not self._begun[index]:
            self._begun[index] = True
            if (first := self._shape.first(index)) is not None:
                batch.append(self._chunk(first, shown=False))
        if piece.text:
            batch.append(self._chunk(self._shape.delta(index, piece)))
            piece = Piece("", ())
        if output.finish:
            batch.append(self._chunk(self._shape.last(index, output.finish, piece)))

    async def collect(self) -> bytes:
        """The whole response. Raises the error that ended a choice, or `ClientGone`."""
        while self._open:
            await self._advance()
        choices = []
        for output in self._outputs:
            piece = output.take()
            choices.append(Choice(piece.text, output.finish, list[ScoredToken](piece.scored)))
        return self._shape.whole(choices, self._usage())

    async def _advance(self) -> list[int]:
        """Feeds what has come; returns the choices that have news, in order.

        An error is raised once the tokens that came before it have been shown.
        """
        if self._error is not None:
            raise self._error
        changed: dict[int, None] = {}
        for choice, news in await self.mailbox.take():
            if self._outputs[choice].finish:
                continue
            if isinstance(news, RyzansteinError):
                if not changed:
                    raise news
                self._error = news
                break
            self._feed(choice, news)
            changed[choice] = None
        return list(changed)

    def _feed(self, choice: int, entry: TokenEntry) -> None:
        output = self._outputs[choice]
        if entry.tokens:
            self._observe(choice)
        output.feed(entry)
        if output.finish:
            self._open -= 1
            self._owner.cancel([self._generations[choice]])  # a stop string: the ring need not go on

    def _observe(self, choice: int) -> None:
        now = time.perf_counter()
        last = self._arrivals.get(choice)
        if last is not None:
            self._metrics.between_tokens.observe(now - last)
        elif not self._arrivals:
            self._metrics.first_token.observe(now - self._began)
        self._arrivals[choice] = now

    def _usage(self) -> Usage:
        """Each prompt counts once, however many choices share it."""
        prompts: dict[int, tuple[int, int]] = {}
        for generation in self._generations:
            prompt = generation.request.prompt
            _, cached = prompts.get(id(prompt), (0, 0))
            prompts[id(prompt)] = len(prompt), max(cached, generation.cached_tokens)
        return Usage.of(
            sum(length for length, _ in prompts.values()),
            sum(output.tokens for output in self._outputs),
            sum(cached for _, cached in prompts.values()),
        )
