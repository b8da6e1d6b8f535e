"""The frames that a leader has published lately, to be published again after the connection was lost.

A core publish that was on its way when the broker died is lost without an error, and a lost last
frame leaves no gap that a reader could see. Positions make a repeat harmless. While the broker is away
the newest are kept, in bounded number and size; readers see the gap before those, and their gateways have
what is missing computed again.
"""

from collections import deque
from collections.abc import Iterator

from services.executor.gathering import size_of
from shared import limits
from shared.messages import TokenFrame

KEPT_SECONDS = 15.0
KEPT_FRAMES = limits.RECENT_FRAMES.value
KEPT_BYTES = limits.RECENT_FRAME_BYTES.value
"""Of what frames hold beside tokens."""


class RecentFrames:
    """Pure: time (seconds, monotonic) comes in as an argument."""

    def __init__(self) -> None:
        self._frames: deque[tuple[float, str, TokenFrame]] = deque()
        self._bytes = 0

    def add(self, consumer: str, frame: TokenFrame, now: float, connected: bool) -> None:
        """Keeps `frame`. While the connection is away nothing grows old."""
        self._frames.append((now, consumer, frame))
        self._bytes += _size_of(frame)
        while self._is_full or (connected and self._frames[0][0] < now - KEPT_SECONDS):
            _, _, oldest = self._frames.popleft()
            self._bytes -= _size_of(oldest)

    @property
    def _is_full(self) -> bool:
        return len(self._frames) > KEPT_FRAMES or (self._bytes > KEPT_BYTES and len(self._frames) > 1)

    def __iter__(self) -> Iterator[tuple[str, TokenFrame]]:
        """(consumer, frame), the oldest first."""
        return iter([(consumer, frame) for _, consumer, frame in self._frames])


def _size_of(frame: TokenFrame) -> int:
    return sum(map(size_of, frame.entries))
