"""What is decided about a generation, and within which bounds."""

import enum

import msgspec


class Decision(enum.Enum):
    """What the shell has to do now."""

    NOTHING = enum.auto()
    REPLAY = enum.auto()
    """Read the journal: tokens are missing, or have not come for too long."""
    REREAD = enum.auto()
    """Read the log again from its beginning: the ring that was listened to here is not the one that counts."""
    RECOVER = enum.auto()
    """Hand the request in again."""
    REJECT = enum.auto()
    """Tell the ring that sent the entry to end this attempt: it is not the one that is listened to."""
    EXPIRE = enum.auto()
    """Nobody produced a token in time: end it with an error."""
    ENDED = enum.auto()
    """Forget it; the client has been told."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a generation's life."""

    max_attempts: int
    """Times that a request is handed in again."""
    token_timeout: float
    """Seconds without a new token after which the generation has failed."""
    stall: float
    """Seconds without anything new from the ring after which the journal is read; doubles each time."""
    whole: float = 0.0
    """Seconds that it may take in all; 0: any time. The batch lane has a clock of its own."""
