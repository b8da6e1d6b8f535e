"""One subscription to a gateway's token frames, and the journal behind it: its own, or another gateway's."""

import asyncio
from collections.abc import Callable

import structlog
from nats.aio.subscription import Subscription

from shared import subjects
from shared.broker_errors import BROKER_ERRORS, reason_of
from shared.bus import Bus
from shared.journal import JournalReader
from shared.messages import TokenFrame

log = structlog.get_logger(__name__)

REPLAY_INTERVAL = 0.1
"""Seconds between two readings of the journal: a burst of gap notices costs few of them."""


class TokenConsumer:
    """Live frames and recorded ones reach the same cursors, which drop repeats."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        *,
        on_frame: Callable[[TokenFrame], object],
        on_recorded: Callable[[TokenFrame], object],
        replay_since: Callable[[], float | None],
        on_replayed: Callable[[], None],
        pending_frames: int,
    ) -> None:
        """`replay_since` gives the unix time from which something may be missing, None when nothing is."""
        self._bus = bus
        self._name = name
        self._on_frame = on_frame
        self._on_recorded = on_recorded
        self._replay_since = replay_since
        self._on_replayed = on_replayed
        self._pending_frames = pending_frames
        self._journal = JournalReader(bus, name)
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._late: list[tuple[float, asyncio.Future[None]]] = []
        """Who has come later than the frames they need, with the unix time of the first of them."""
        self._subscription: Subscription | None = None
        self._stopping = False
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
        """Unsubscribes; `run` ends even where nats-py swallows its cancellation."""
        self._stopping = True
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

    async def catch_up(self, since: float) -> None:
        """Returns when everything recorded from `since` (unix seconds) on has been given to `on_recorded`.

        Those who ask at the same time share one reading.
        """
        done = asyncio.get_running_loop().create_future()
        self._late.append((since, done))
        self._wanted.set()
        await done

    async def run(self) -> None:
        """Reads the journal whenever that is asked for. Runs until it is cancelled."""
        while not self._stopping:
            await self._wanted.wait()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            late, self._late = self._late, []
            try:
                await self._read(late)
            except BROKER_ERRORS as error:
                log.warning("replay_failed", consumer=self._name, error=reason_of(error))
                self._waiting += waiting
                self._late += late
                self._wanted.set()
            else:
                for done in [*waiting, *(done for _, done in late)]:
                    if not done.done():
                        done.set_result(None)
            await asyncio.sleep(REPLAY_INTERVAL)

    async def _read(self, late: list[tuple[float, "asyncio.Future[None]"]]) -> None:
        """From where the last reading ended; for those who are late, from the beginning."""
        if late:
            await self._replay(JournalReader(self._bus, self._name), min(since for since, _ in late))
        elif (since := self._replay_since()) is not None:
            await self._replay(self._journal, since)

    async def _replay(self, journal: JournalReader, since: float) -> None:
        self.replays += 1
        frames = 0
        async for frame in journal.read(since):
            frames += 1
            self._on_recorded(frame)
        log.info("journal_replayed", consumer=self._name, frames=frames)
        self._on_replayed()

    async def _receive(self, frame: TokenFrame) -> None:
        self._on_frame(frame)
