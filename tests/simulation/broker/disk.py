"""What of JetStream outlives a server: its streams, and consumers that are not kept in memory.

A server that is killed has written everything to the operating system, so all of it is there again. With a loss of
power what was written since the last sync is gone: nats-server syncs every two minutes unless it is told otherwise.
"""

import pickle
from pathlib import Path

from tests.simulation.broker.configs import SECOND
from tests.simulation.broker.consumers import Consumer
from tests.simulation.broker.streams import Stream

SYNC_INTERVAL = 120.0  # seconds, as nats-server's `sync_interval`; 0: always


class Disk:
    """Of one server; hand it to the next one that is started in its place."""

    def __init__(self, *, sync_interval: float = SYNC_INTERVAL) -> None:
        self.full = False  # whether no byte can be written
        self.dirty = False
        self._interval = int(sync_interval * SECOND)
        self._streams: dict[str, Stream] = {}
        self._lost_from: int | None = None

    def add(self, stream: Stream) -> None:
        self._streams[stream.config.name] = stream
        self.dirty = True

    def delete(self, stream: str) -> None:
        self._streams.pop(stream, None)
        self.dirty = True

    def changed(self) -> None:
        self.dirty = True

    def lose_power(self, now: int) -> None:
        """What was written since the last sync is not there when it is loaded. `now`: unix nanoseconds."""
        self._lost_from = now - now % self._interval if self._interval else None

    def load(self, now: float) -> list[Stream]:
        """What is there, for a server that starts; `now` in seconds of its clock."""
        lost_from, self._lost_from = self._lost_from, None
        self._streams = {name: revived(stream, now, lost_from) for name, stream in self._streams.items()}
        return list(self._streams.values())

    def write(self, path: Path) -> None:
        """Into a file, where it has changed."""
        if self.dirty:
            self.dirty = False
            part = path.with_suffix(".part")
            part.write_bytes(pickle.dumps(self._streams))
            part.replace(path)

    def read(self, path: Path) -> None:
        """From a file that `write` has written; no error where it is not there."""
        if path.exists():
            self._streams = pickle.loads(path.read_bytes())  # it is our own


def revived(old: Stream, now: float, lost_from: int | None) -> Stream:
    """As a server finds it that starts; without messages from `lost_from` on (unix nanoseconds)."""
    stream = Stream(old.config, old.created)
    for message in old.messages.values():
        if lost_from is None or message.time < lost_from:
            stream.restore(message)
    if lost_from is None:
        stream.last_sequence, stream.last_time = old.last_sequence, old.last_time
    for watcher in old.watchers.values():
        if isinstance(watcher, Consumer) and not watcher.config.mem_storage:
            stream.watchers[watcher.name] = watcher.revived(stream, now)
    return stream
