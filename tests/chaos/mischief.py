"""Frames that come twice, late, in the wrong order, or not at all.

FrameMischief   sits in a gateway's link and reads NATS' protocol: what the broker sends is kept back,
                repeated, swapped and dropped. The journal still has it.
DeafToBatches   sits in an executor's link: its leader does not hear the schedulers any more.
Repeater        sits on the bus and publishes real frames again, in any order, also into the journal.
"""

import asyncio
import random
import re

from nats.aio.msg import Msg

from shared.nats import subjects
from shared.nats.bus import Bus

DROPPED, REPEATED, KEPT_BACK = 0.02, 0.10, 0.15  # shares of the token messages that this happens to
MOST_KEPT = 8
REMEMBERED = 200


class FrameMischief:
    """Pure: bytes of the broker in, bytes for the service out. Other messages than token frames pass."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._buffer = b""
        self._kept: list[bytes] = []
        self.dropped = self.repeated = self.swapped = 0

    def feed(self, data: bytes) -> bytes:
        if data.startswith(b"INFO ") and not self._buffer:
            self._kept = []  # a new connection: what was kept back is of the old one
        self._buffer += data
        out = []
        while (message := self._next()) is not None:
            if _is_live_frame(message):
                out += self._play(message)
            else:
                out.append(message)
        return b"".join(out)

    def _next(self) -> bytes | None:
        """The next whole protocol message in the buffer."""
        line, found, _ = self._buffer.partition(b"\r\n")
        if not found:
            return None
        size = len(line) + 2
        if line.startswith((b"MSG ", b"HMSG ")):
            size += int(line.split()[-1]) + 2
        if len(self._buffer) < size:
            return None
        message, self._buffer = self._buffer[:size], self._buffer[size:]
        return message

    def _play(self, message: bytes) -> list[bytes]:
        draw = self._chance.random()
        if draw < DROPPED:
            self.dropped += 1
            return self._release()
        if draw < DROPPED + REPEATED:
            self.repeated += 1
            return [message, *self._release(), message]
        if draw < DROPPED + REPEATED + KEPT_BACK and len(self._kept) < MOST_KEPT:
            self.swapped += 1
            self._kept.append(message)
            return []
        return [message, *self._release()]

    def _release(self) -> list[bytes]:
        """Sometimes what was kept back comes after all, shuffled."""
        if not self._kept or self._chance.random() < 0.5:
            return []
        kept, self._kept = self._kept, []
        self._chance.shuffle(kept)
        return kept


def _is_live_frame(message: bytes) -> bool:
    """A reading of the journal is one unbroken conversation, and left alone: its messages can be answered."""
    line = message.partition(b"\r\n")[0]
    return line.startswith((b"MSG tokens.", b"HMSG tokens.")) and b"$JS.ACK" not in line


class Repeater:
    """Publishes token frames of the past again. Use as an asynchronous context manager."""

    def __init__(self, bus: Bus, chance: random.Random, pause: float = 0.02) -> None:
        self._bus = bus
        self._chance = chance
        self._pause = pause
        self._frames: list[tuple[str, bytes]] = []
        self.published = 0

    async def __aenter__(self) -> "Repeater":
        self._subscription = await self._bus.client.subscribe(subjects.ALL_TOKENS, cb=self._hear)
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._subscription.unsubscribe()

    async def _hear(self, message: Msg) -> None:
        """Keeps a sample of all frames, its own among them."""
        if len(self._frames) < REMEMBERED:
            self._frames.append((message.subject, message.data))
        else:
            self._frames[self._chance.randrange(REMEMBERED)] = message.subject, message.data

    async def _repeat(self) -> None:
        while True:
            for subject, data in self._chance.sample(self._frames, min(5, len(self._frames))):
                await self._bus.client.publish(subject, data)
                self.published += 1
            await asyncio.sleep(self._pause)


class DeafToBatches:
    """While it is on, an executor's leader does not hear what schedulers send; everything else passes.

    A message for a subscription that a client does not have is thrown away by it. Several connections use it at
    the same time, so it keeps nothing; a head that two packets share is heard.
    """

    def __init__(self) -> None:
        self.on = False

    def feed(self, data: bytes) -> bytes:
        return _DISPATCH.sub(rb"\g<1>999999", data) if self.on else data


_DISPATCH = re.compile(rb"(MSG groups\.[^ ]+\.dispatch )\d+")
