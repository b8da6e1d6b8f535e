"""One connection's reading of an answer that is shown as numbered events.

The events are a function of the log alone, for each token is taken by itself, however the frames were cut that brought
it. So event n is the same for every reader on every gateway, and a position is the number of an event.
"""

from collections.abc import Container, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from services.gateway.core.errors import InvalidField
from services.gateway.core.metrics import ModelMetrics
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.streams.formats import ResponseSerializer
from services.gateway.streams.output import OutputDelta, output_of
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import TokenEntry


class Numbered(Protocol):
    """The events of one answer, from its beginning."""

    count: int  # events so far


class NumberedReader(StreamReader):
    """As `StreamReader`, of one choice."""

    ends_with_done = False
    text_is_event: ClassVar[bool] = False  # whether more text is one event and nothing else
    resumed_by: ClassVar[str] = "Last-Event-ID"  # what of a request says which event its client has
    obfuscated = False  # whether its deltas are padded for this reader, where its events may be
    _events: Numbered
    _told: bool = True  # whether there are events; a whole answer may need none

    def __init__(
        self,
        answer: RequestState,
        tokenizer: Tokenizer,
        answers: RequestTracker | None,
        metrics: ModelMetrics | None,
        *,
        after: Sequence[int] | None = None,
    ) -> None:
        """`after`: the number of the last event that the client has; None: it has none."""
        self._output = output_of(answer.record, answer.record.requests[0], tokenizer)
        super().__init__(answer, ResponseSerializer([self._output]), answers, metrics)  # it is shown as events
        self._plain = self._plain and self.text_is_event
        self._begun = [True]  # events do so by themselves
        self._stop_token_ids = frozenset(answer.generations[0].request.stop_token_ids)
        self._known = -1 if after is None else after[0]
        self._events = self._begun_events(answer, tokenizer)

    def _begun_events(self, answer: RequestState, tokenizer: Tokenizer) -> Any:
        """Those of `answer`, none of whose tokens have come."""
        raise NotImplementedError

    @property
    def position(self) -> str:
        """The number of the last event that `snapshot` has seen; empty: there was none."""
        return str(self._events.count - 1) if self._events.count else ""

    def _feed(self, choice: int, entry: TokenEntry) -> None:
        if not self._told:
            super()._feed(choice, entry)
            return
        if entry.tokens and self._metrics is not None:
            self._observe(choice, self._metrics)
        output, tokens, ends = self._output, entry.tokens, self._stop_token_ids
        alone = not tokens or (len(tokens) == 1 and not entry.finish and tokens[0] not in ends)
        for part in (entry,) if alone else _each_token(entry, ends):
            output.feed(part)
            self._show(output.take())
            if output.finish:
                self._open = 0
                if self._answers is not None:
                    self._answers.end_choice(self.answer, choice)
                return

    def _show(self, piece: OutputDelta) -> None:
        """What one token has made clear, perhaps nothing, and the end where it is one."""
        raise NotImplementedError

    def _check_known(self) -> None:
        """Once the last event is known: a position behind it is one of another answer. Raises `InvalidParameter`."""
        if self._known >= (count := self._events.count):
            raise InvalidField(
                self.resumed_by,
                f"event {self._known} is beyond the end of the answer, which has "
                f"{count} events; send the number of one of them.",
                reason="invalid_position",
            )


def _each_token(entry: TokenEntry, stop_token_ids: Container[int]) -> Iterator[TokenEntry]:
    """Each token by itself, and the end behind the last one. A token that ends the text is the end, whether the ring
    has said so with it or not."""
    for index, token in enumerate(entry.tokens):
        scores = entry.logprobs
        yield msgspec.structs.replace(
            entry,
            position=entry.position + index,
            tokens=[token],
            finish="stop" if token in stop_token_ids else "",
            logprobs=None if scores is None else scores[index : index + 1],
        )
    if entry.finish:
        behind = entry.position + len(entry.tokens)
        yield msgspec.structs.replace(entry, position=behind, tokens=[], logprobs=None)
