"""Token logs of other gateways that are read here, each for as long as a generation needs it.

answers that are followed, or were taken over ──▶ {gateway: its token subject, live and recorded}
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from services.gateway.life.consumer import TokenConsumer

log = structlog.get_logger(__name__)


class _Source:
    def __init__(self, consumer: TokenConsumer) -> None:
        self.consumer = consumer
        self.users = 0
        self.started = asyncio.ensure_future(consumer.start())
        self.task = asyncio.create_task(consumer.run())
        self.task.add_done_callback(_done)


class Sources:
    """Opened by the first who needs it, closed by the last."""

    def __init__(self, open_source: Callable[[str], TokenConsumer]) -> None:
        self._open = open_source
        self._sources: dict[str, _Source] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def acquire(self, name: str) -> TokenConsumer:
        """The log of the gateway `name`; no frame that is published from now on is missed."""
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source(self._open(name))
        source.users += 1
        try:
            await asyncio.shield(source.started)
        except BaseException:
            self.release(name)
            raise
        return source.consumer

    def get(self, name: str) -> TokenConsumer | None:
        """The log of the gateway `name`, while somebody needs it."""
        source = self._sources.get(name)
        return None if source is None else source.consumer

    def release(self, name: str) -> None:
        """Undoes one `acquire`."""
        source = self._sources.get(name)
        if source is None:  # all have been closed
            return
        source.users -= 1
        if not source.users:
            del self._sources[name]
            task = asyncio.create_task(_close(source))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def request_replay(self, names: Iterable[str]) -> None:
        """Lets the journal of these be read soon."""
        for name in names:
            if (source := self._sources.get(name)) is not None:
                source.consumer.request_replay()

    async def stop(self) -> None:
        """Closes all."""
        sources, self._sources = self._sources, {}
        await asyncio.gather(*(_close(source) for source in sources.values()), *self._closing)


async def _close(source: _Source) -> None:
    source.task.cancel()
    await asyncio.gather(source.started, source.task, return_exceptions=True)
    await source.consumer.stop()


def _done(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("source_failed", error=str(error))
