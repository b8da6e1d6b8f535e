"""A collector for tests: takes OTLP over HTTP, keeps the spans, and can be slow."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from benchmarks.waterfall import Received, serve

ReceivedSpan = Received


class Collector:
    """Use `collector()`."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.answering = threading.Event()
        """Cleared: whoever sends waits."""
        self.answering.set()
        self._news = threading.Condition()
        self.url = ""

    def take(self, spans: list[Received]) -> None:
        self.answering.wait(60)
        with self._news:
            self.spans += spans
            self._news.notify_all()

    def wait_for(self, condition: Callable[[list[Received]], bool], timeout: float = 60) -> None:
        """Until the spans so far fulfil `condition`; to be called in a thread."""
        with self._news:
            assert self._news.wait_for(lambda: condition(self.spans), timeout), self.shown()

    def of(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def shown(self) -> str:
        return "\n".join(f"{s.trace_id[:6]} {s.service} {s.name} {s.attributes}" for s in self.spans)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A running one."""
    found = Collector()
    server = serve(0, found.take)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.answering.set()
        server.shutdown()
        server.server_close()
        thread.join()
