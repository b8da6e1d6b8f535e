"""The frames that a leader has published lately, to be published again after the connection was lost.

A core publish that was on its way when the broker died is lost without an error, and a lost last
frame leaves no gap that a reader could see. Positions make a repeat harmless.
"""

from collections import deque
from collections.abc import Iterator

from shared.messages import TokenFrame

KEPT_SECONDS = 15.0
KEPT_FRAMES = 8192


class RecentFrames:
    """Pure: time (seconds, monotonic) comes in as an argument."""

    def __init__(self) -> None:
        self._frames: deque[tuple[float, str, TokenFrame]] = deque(maxlen=KEPT_FRAMES)

    def add(self, consumer: str, frame: TokenFrame, now: float, connected: bool) -> None:
        """Keeps `frame`. While the connection is away nothing grows old."""
        self._frames.append((now, consumer, frame))
        while connected and self._frames[0][0] < now - KEPT_SECONDS:
            self._frames.popleft()

    def __iter__(self) -> Iterator[tuple[str, TokenFrame]]:
        """(consumer, frame), the oldest first."""
        return iter([(consumer, frame) for _, consumer, frame in self._frames])
