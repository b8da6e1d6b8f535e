"""One choice's tokens to reasoning, content and calls: a parser behind `TextOutput`.

What the parser holds back depends on the tokens alone, as with stop strings (`cursor.py`): a reader that has read as
many tokens in silence goes on within a call exactly where another stood.
"""

from services.gateway.text.text_output import Piece, ScoredToken, StopReason, TextOutput
from services.gateway.tools.calls import CallNumbering
from services.gateway.tools.families import FAMILIES
from services.gateway.tools.parser import Parser
from services.gateway.tools.parsers.scanner import Event, Text, Thought
from shared.messages import TokenEntry
from shared.messages.records import Parsing


class ParsedOutput:
    """Used as `TextOutput` is."""

    def __init__(self, output: TextOutput, parsing: Parsing, generation_id: str) -> None:
        self._output = output
        self._parsing = parsing
        family = FAMILIES.get(parsing.tools)
        self._parser = Parser(
            family.machine if family else None,
            parsing.types,
            thinking=parsing.reasoning,
            opened=parsing.opened,
        )
        self._calls = CallNumbering(generation_id, single=parsing.single)
        self._events: list[Event] = []
        self._scored: list[ScoredToken] = []
        self._prompt: bytes | None = None
        self._ids: list[int] = []
        self._ended = False

    @property
    def tokens(self) -> int:
        return self._output.tokens

    @property
    def stop_reason(self) -> StopReason:
        return self._output.stop_reason

    @property
    def mean_logprob(self) -> float:
        return self._output.mean_logprob

    @property
    def finish(self) -> str:
        """`tool_calls` where the model has stopped after a call of its own choice, as in OpenAI's API; `stop`
        where the function was demanded by its name."""
        reason = self._output.finish
        if reason != "stop" or not self._calls.begun or self._parsing.named:
            return reason
        return "function_call" if self._parsing.legacy else "tool_calls"

    def feed(self, entry: TokenEntry) -> None:
        """Takes the next entry."""
        if self._ended:
            return
        self._output.feed(entry)
        piece = self._output.take()
        self._scored += piece.scored
        self._ids += piece.ids
        self._prompt = self._prompt if piece.prompt is None else piece.prompt
        self._events += self._parser.feed(piece.text)
        if self._output.finish:
            self._ended = True
            self._events += self._parser.finish()

    def take(self) -> Piece:
        """What has become visible since the last call."""
        events, self._events = self._events, []
        scored, self._scored = self._scored, []
        prompt, self._prompt = self._prompt, None
        ids, self._ids = self._ids, []
        return Piece(
            "".join(event.text for event in events if isinstance(event, Text)),
            scored,
            "".join(event.text for event in events if isinstance(event, Thought)),
            self._calls.deltas(events),
            prompt=prompt,
            ids=ids,
        )
