"""Sees on the bus what happens in the house, and when: deaths, recoveries, who continues what."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from shared.messages import GroupEvent, Heartbeat, ServiceRecord, TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

T = TypeVar("T")


class Watch:
    """All times are seconds of `time.monotonic` at which the news reached the test."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.events: list[tuple[float, GroupEvent]] = []
        self.beats: dict[str, Heartbeat] = {}  # the last one of each instance
        self.states: list[tuple[float, ServiceRecord]] = []  # each change of a service's record
        # Generations that another attempt than the first has continued: when its first tokens came.
        self.moved: dict[str, float] = {}
        # Entries, and tokens in them, of an attempt that another one had taken the place of.
        self.late = self.late_tokens = 0
        self._attempts: dict[str, int] = {}
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.subscribe(subjects.HEALTH_EVENTS, GroupEvent, self._on_event)
        await self._bus.subscribe(subjects.ALL_BEATS, Heartbeat, self._on_beat)
        await self._bus.subscribe(subjects.ALL_TOKENS, TokenFrame, self._on_frame)
        await self._bus.flush()
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def until(self, find: Callable[[], T | None], seconds: float, what: str) -> T:
        """What `find` returns, once that is something true."""
        try:
            async with asyncio.timeout(seconds):
                while not (found := find()):
                    self._news.clear()
                    await self._news.wait()
                return found
        except TimeoutError:
            raise AssertionError(f"{what}: not within {seconds:g} s") from None

    async def down(self, group: str, since: float, seconds: float = 30) -> float:
        """When the loss of `group` was told after `since`."""
        return await self.until(lambda: self._event(group, "down", since), seconds, f"{group} is told to be down")

    async def up(self, group: str, since: float, seconds: float = 150) -> float:
        return await self.until(lambda: self._event(group, "up", since), seconds, f"{group} is told to be up")

    async def service(self, instance: str, state: str, since: float, seconds: float = 60) -> float:
        """When the record of `instance` came to say `state` after `since`."""

        def find() -> float | None:
            for at, record in self.states:
                if at >= since and record.instance == instance and record.state == state:
                    return at
            return None

        return await self.until(find, seconds, f"{instance} is recorded as {state}")

    def _event(self, group: str, kind: str, since: float) -> float | None:
        for at, event in self.events:
            if at >= since and event.group == group and event.kind == kind:
                return at
        return None

    # --- from the bus ----------------------------------------------------------------------------

    async def _on_event(self, event: GroupEvent) -> None:
        self.events.append((time.monotonic(), event))
        self._news.set()

    async def _on_beat(self, beat: Heartbeat) -> None:
        self.beats[beat.instance] = beat
        self._news.set()

    async def _on_frame(self, frame: TokenFrame) -> None:
        for entry in frame.entries:
            newest = self._attempts.get(entry.generation_id, 0)
            if entry.attempt < newest:
                self.late += 1
                self.late_tokens += len(entry.tokens)
                self._news.set()
            elif entry.attempt > newest and entry.tokens:
                self._attempts[entry.generation_id] = entry.attempt
                self.moved.setdefault(entry.generation_id, time.monotonic())
                self._news.set()

    async def _follow(self) -> None:
        bucket = await Bucket.open(self._bus, subjects.SERVICES_BUCKET, ServiceRecord)
        last: dict[str, str] = {}
        async for update in bucket.watch():
            if update is None or update[1] is None:
                continue
            name, record = update
            if last.get(name) != record.state:
                last[name] = record.state
                self.states.append((time.monotonic(), record))
                self._news.set()
