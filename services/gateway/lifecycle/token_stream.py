"""One generation's cursor over its log: every token once, in order, whatever the network did.

    position:      0        3     5             8
    delivered     [ t0 t1 t2 t3 t4 ]
    next expected                  ^ position 5
    ahead                                       [ t8 t9 ]   kept until the gap 5..7 is filled

Invariants: what `accept` returns over time, end to end, is the log from the first position on, without a
hole or a repeat; entries of another attempt than the current one change nothing; after the end nothing
comes any more.

And what is decided about a generation, and within which bounds.
"""

import enum

import msgspec

from services.gateway.core.settings import GatewaySettings
from shared.messages import TokenEntry


class TokenStream:
    """Pure: entries in (live and replayed, in any order), new tokens out (in order)."""

    __slots__ = ("ahead", "attempt", "ended", "position")

    def __init__(self, *, attempt: int = 0, position: int = 0) -> None:
        self.attempt = attempt
        self.position = position  # position of the next token to deliver
        self.ended = False
        self.ahead: dict[int, TokenEntry] = {}  # later tokens that are here while earlier ones are missing

    def accept(self, entry: TokenEntry) -> list[TokenEntry]:
        """What became deliverable by `entry`: trimmed to new tokens, in order, at most the last with `finish`."""
        if self.ended or entry.attempt != self.attempt:
            return []
        if entry.position == self.position and not self.ahead:  # nearly always
            self.position += len(entry.tokens)
            self.ended = bool(entry.finish)
            return [entry] if entry.tokens or entry.finish else []
        if entry.position > self.position:
            self._keep(entry)
            return []
        fresh = self._take(entry)
        if not self.ahead or not fresh:
            return fresh
        while not self.ended and (waiting := self._next_ahead()) is not None:
            fresh += self._take(waiting)
        return fresh

    def restart(self, attempt: int) -> None:
        """From now on `attempt` speaks; it continues after the tokens delivered so far."""
        assert attempt > self.attempt, "attempts only grow"
        self.attempt = attempt
        self.ended = False
        self.ahead.clear()

    def _keep(self, entry: TokenEntry) -> None:
        known = self.ahead.get(entry.position)
        if known is None or len(known.tokens) < len(entry.tokens) or (entry.finish and not known.finish):
            self.ahead[entry.position] = entry

    def _next_ahead(self) -> TokenEntry | None:
        """The kept entry that reaches the expected position, if one does; stale ones are dropped."""
        for position in sorted(self.ahead):
            if position > self.position:
                return None
            entry = self.ahead.pop(position)
            if entry.finish or position + len(entry.tokens) > self.position:
                return entry
        return None

    def _take(self, entry: TokenEntry) -> list[TokenEntry]:
        """`entry` without what has been delivered; empty when nothing is new."""
        known = self.position - entry.position
        if known > len(entry.tokens):
            if entry.finish != "error":
                return []  # a repeat: an end that lies behind us would have ended us then
            known = len(entry.tokens)
        elif known == len(entry.tokens) and not entry.finish:
            return []
        self.position += len(entry.tokens) - known
        self.ended = bool(entry.finish)
        if not known:
            return [entry]
        return [
            msgspec.structs.replace(
                entry,
                position=entry.position + known,
                tokens=entry.tokens[known:],
                logprobs=None if entry.logprobs is None else entry.logprobs[known:],
                prompt_scores=b"",
            )
        ]


class StreamDecision(enum.Enum):
    """What the shell has to do now."""

    NOTHING = enum.auto()
    REPLAY = enum.auto()  # read the journal: tokens are missing, or have not come for too long
    # Read the log again from its beginning: the ring that was listened to here is not the one that counts.
    REREAD = enum.auto()
    RECOVER = enum.auto()  # hand the request in again
    # Tell the ring that sent the entry to end this attempt: it is not the one that is listened to.
    REJECT = enum.auto()
    EXPIRE = enum.auto()  # nobody produced a token in time: end it with an error
    ENDED = enum.auto()  # forget it; the client has been told


class GenerationLimits(msgspec.Struct, frozen=True):
    """Bounds of a generation's life."""

    max_attempts: int  # times that a request is handed in again
    token_timeout: float  # seconds without a new token after which the generation has failed
    # Seconds without anything new from the ring after which the journal is read; doubles each time.
    stall: float
    whole: float = 0.0  # seconds that it may take in all; 0: any time. The batch lane has a clock of its own


def limits_of(settings: GatewaySettings) -> GenerationLimits:
    """The bounds of every generation's life."""
    return GenerationLimits(
        settings.recovery_attempts, settings.token_timeout, settings.stall_timeout, settings.request_timeout
    )
