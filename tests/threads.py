"""For tests whose subject runs an event loop of its own."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from services.cli.nats_server import LocalNats


@contextlib.contextmanager
def nats_in_thread() -> Iterator[tuple[str, str, str]]:
    """A NATS server whose process is watched by a loop in another thread: (url, user, password)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with tempfile.TemporaryDirectory() as directory:
        server = LocalNats(Path(directory))
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
        try:
            yield server.url, server.user, server.password
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
