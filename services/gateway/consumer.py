"""The gateway's one subscription to its token frames, and the journal behind it."""

import asyncio
from collections.abc import Callable

import nats.errors
import structlog
from nats.aio.subscription import Subscription

from shared import subjects
from shared.bus import Bus
from shared.journal import replay
from shared.messages import TokenFrame

log = structlog.get_logger(__name__)

REPLAY_INTERVAL = 0.1
"""Seconds between two readings of the journal: a burst of gap notices costs few of them."""


class TokenConsumer:
    """Live frames and replayed ones go through the same door; the cursor behind it drops repeats."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        *,
        on_frame: Callable[[TokenFrame], None],
        replay_since: Callable[[], float | None],
        on_replayed: Callable[[], None],
        pending_frames: int,
    ) -> None:
        """`replay_since` gives the unix time from which something may be missing, None when nothing is."""
        self._bus = bus
        self._name = name
        self._on_frame = on_frame
        self._replay_since = replay_since
        self._on_replayed = on_replayed
        self._pending_frames = pending_frames
        self._wanted = asyncio.Event()
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

    async def run(self) -> None:
        """Reads the journal whenever that is asked for. Runs until it is cancelled."""
        while not self._stopping:
            await self._wanted.wait()
            self._wanted.clear()
            since = self._replay_since()
            if since is None:
                continue
            try:
                await self._replay(since)
            except (nats.errors.Error, TimeoutError) as error:
                log.warning("replay_failed", error=str(error))
                self._wanted.set()
            await asyncio.sleep(REPLAY_INTERVAL)

    async def _replay(self, since: float) -> None:
        self.replays += 1
        frames = 0
        async for frame in replay(self._bus, self._name, since):
            frames += 1
            self._on_frame(frame)
        log.info("journal_replayed", frames=frames)
        self._on_replayed()

    async def _receive(self, frame: TokenFrame) -> None:
        self._on_frame(frame)
