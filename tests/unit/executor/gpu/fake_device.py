"""A device that does its work when it is told to."""

from collections import deque


class FakeDevice:
    """`gpu.device_progress.Marks` on a stream that a test runs by hand."""

    def __init__(self) -> None:
        self.last = 0
        self.capturing = False
        self.queued: deque[int] = deque()

    def put(self, number: int) -> None:
        self.queued.append(number)

    def pass_marks(self, count: int) -> None:
        """Does the work up to the next `count` marks, or all of it."""
        for _ in range(min(count, len(self.queued))):
            self.last = self.queued.popleft()
