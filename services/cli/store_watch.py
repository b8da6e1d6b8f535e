"""The store of a NATS server whose disk was full: NATS is started again once there is room.

a write fails for lack of space ──▶ that stream takes nothing more, or JetStream is off, until a new start
looks: said in the log ──▶ room on the disk ──▶ it is ended; whoever keeps it up starts it
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from services.cli.nats_server import LocalNats

LOOK = 1.0
"""Seconds between two looks."""
ROOM = 16 << 20
"""Bytes that must be free: with less the next write would fail again."""
SIGN = b"no space left on device"
"""What the system calls it, and so nats-server's log. Nothing else tells: a stream in this state still describes
itself."""


class StoreWatch:
    """Of a server that was started with JetStream. `run` beside whatever starts it again when it ends."""

    def __init__(self, nats: LocalNats, directory: Path, tell: Callable[[str], None]) -> None:
        """`directory` is on the store's file system."""
        self._nats = nats
        self._directory = directory
        self._tell = tell
        self._read = self._size()
        """Bytes of the log that have been looked at."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        full = False
        while True:
            await asyncio.sleep(LOOK)
            if not full and self._fails():
                full = True
                self._tell(
                    f"The disk of NATS' store is full: free space at {self._directory}. Answers that run go on, new "
                    "requests are refused; NATS is started again when there is room."
                )
            if full and shutil.disk_usage(self._directory).free >= ROOM:
                self._tell("There is room for the store of NATS again.")
                await self._nats.stop()
                full, self._read = False, self._size()

    def _size(self) -> int:
        return self._nats.log.stat().st_size if self._nats.log.exists() else 0

    def _fails(self) -> bool:
        """Whether the log has said so since it was looked at last. A line that is cut here is said again soon."""
        with self._nats.log.open("rb") as file:
            file.seek(self._read)
            news = file.read()
        self._read += len(news)
        return SIGN in news
