"""Keeps an `Authenticator` up to date with the KV bucket `keys`."""

import asyncio

from services.gateway.auth.authenticator import Authenticator
from shared.keys import KeyRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket


class KeyWatch:
    """A change reaches every gateway in the time of a message. While NATS is away, what was known last holds."""

    def __init__(self, bus: Bus, authenticator: Authenticator) -> None:
        self._bus = bus
        self._authenticator = authenticator
        self._caught_up = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Runs until it is cancelled."""
        keys = await Bucket.open(self._bus, subjects.KEYS_BUCKET, KeyRecord)
        async for update in keys.watch():
            if self._stopping:
                return
            if update is None:
                self._authenticator.complete()
                self._caught_up.set()
            else:
                self._authenticator.update(*update)

    async def wait(self) -> None:
        """Until every key that there is has been read once."""
        await self._caught_up.wait()

    def stop(self) -> None:
        """Lets `run` end with the next change, should nats-py swallow its cancellation."""
        self._stopping = True
