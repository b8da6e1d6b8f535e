"""Token logs of gateways, live and from the journal: this gateway's own, and others' for as long as they are needed.

answers that are followed, or were taken over ──▶ {gateway: its token subject, live and recorded}
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

import structlog

from shared.messages import TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus, Subscribed
from shared.nats.errors import BROKER_ERRORS, reason_of
from shared.nats.journal import JournalReader, StartPosition, earliest
from shared.tasks import TaskSet, cancel_all

log = structlog.get_logger(__name__)

REPLAY_INTERVAL = 0.1  # seconds between two readings of the journal: a burst of gap notices costs few of them


class _Late:
    """Who has come later than the frames they need."""

    def __init__(self, begin: StartPosition, has_all: Callable[[], bool]) -> None:
        self.begin = begin  # where the first of them stands
        self.has_all = has_all
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class TokenConsumer:
    """Live frames and recorded ones reach the same cursors, which drop repeats."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        *,
        on_frame: Callable[[TokenFrame], object],
        on_recorded: Callable[[TokenFrame], object],
        replay_from: Callable[[], StartPosition | None],
        on_replayed: Callable[[], None],
        pending_frames: int,
    ) -> None:
        """`replay_from` gives where something may begin that is missing, None when nothing is."""
        self._bus = bus
        self._name = name
        self._on_frame = on_frame
        self._on_recorded = on_recorded
        self._replay_from = replay_from
        self._on_replayed = on_replayed
        self._pending_frames = pending_frames
        self._journal = JournalReader(bus, name)
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._late: list[_Late] = []
        self._subscription: Subscribed | None = None
        self.replays = 0

    async def start(self) -> None:
        """Returns when the server knows the subscription: no frame published later is missed."""
        self._subscription = await self._bus.subscribe(
            subjects.tokens(self._name),
            TokenFrame,
            self._receive,
            on_gap=self._wanted.set,
            pending_messages=self._pending_frames,
        )
        await self._bus.flush()

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def request_replay(self) -> None:
        """Lets `run` read the journal soon."""
        self._wanted.set()

    async def replayed(self) -> None:
        """Returns when a reading of the journal that began after this call is complete."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._wanted.set()
        await done

    async def catch_up(self, begin: StartPosition, has_all: Callable[[], bool]) -> None:
        """Returns when everything recorded from `begin` on has been given to `on_recorded`, or so much of it that
        `has_all` says so: what ended long ago is not read up to now.

        Those who ask at the same time share one reading.
        """
        late = _Late(begin, has_all)
        self._late.append(late)
        self._wanted.set()
        await late.done

    async def run(self) -> None:
        """Reads the journal whenever that is asked for. Runs until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            late, self._late = self._late, []
            try:
                whole = bool(late) and await self._catch_up(late)
                if not whole and (begin := self._replay_from()) is not None:
                    await self._replay(self._journal, begin, late=())
            except BROKER_ERRORS as error:
                log.warning("journal_replay_failed", consumer=self._name, error=reason_of(error))
                self._waiting += waiting
                self._late += [one for one in late if not one.done.done()]
                self._wanted.set()
            else:
                for done in waiting:
                    if not done.done():
                        done.set_result(None)
            await asyncio.sleep(REPLAY_INTERVAL)

    async def _catch_up(self, late: Sequence[_Late]) -> bool:
        """For those who are late, from their beginning. Whether it was read to its newest frame."""
        journal = JournalReader(self._bus, self._name)
        begin = earliest(one.begin for one in late)
        assert begin is not None, "somebody is late"
        whole = await self._replay(journal, begin, late)
        for one in late:
            one.settle()
        return whole

    async def _replay(self, journal: JournalReader, begin: StartPosition, late: Sequence[_Late]) -> bool:
        """False when all who were `late` had what they need before its end."""
        self.replays += 1
        frames = 0
        async with contextlib.aclosing(journal.read(begin)) as reading:
            async for frame in reading:
                frames += 1
                self._on_recorded(frame)
                if late and any(entry.finish for entry in frame.entries):
                    late = _without_served(late)
                    if not late:
                        log.info("journal_read", consumer=self._name, frames=frames)
                        return False
        log.info("journal_replayed", consumer=self._name, frames=frames)
        self._on_replayed()
        return True

    async def _receive(self, frame: TokenFrame) -> None:
        self._on_frame(frame)


def _without_served(late: Sequence[_Late]) -> list[_Late]:
    """Lets those go who have what they need."""
    left = []
    for one in late:
        if one.has_all():
            one.settle()
        else:
            left.append(one)
    return left


class _Source:
    def __init__(self, consumer: TokenConsumer, running: TaskSet) -> None:
        self.consumer = consumer
        self.users = 0
        self.started = asyncio.ensure_future(consumer.start())
        self.task = running.spawn(consumer.run())


class TokenLogReaders:
    """Opened by the first who needs it, closed by the last."""

    def __init__(self, open_source: Callable[[str], TokenConsumer]) -> None:
        self._open = open_source
        self._sources: dict[str, _Source] = {}
        self._running = TaskSet("source_failed")
        self._closing = TaskSet("")

    async def acquire(self, name: str) -> TokenConsumer:
        """The log of the gateway `name`; no frame that is published from now on is missed."""
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source(self._open(name), self._running)
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
            self._closing.spawn(_close(source))

    def request_replay(self, names: Iterable[str]) -> None:
        """Lets the journal of these be read soon."""
        for name in names:
            if (source := self._sources.get(name)) is not None:
                source.consumer.request_replay()

    async def stop(self) -> None:
        sources, self._sources = self._sources, {}
        await asyncio.gather(*(_close(source) for source in sources.values()), *self._closing)


async def _close(source: _Source) -> None:
    await cancel_all([source.task])
    await asyncio.gather(source.started, return_exceptions=True)
    await source.consumer.stop()
