"""Tokenizing beside the event loop, a bounded amount at a time.

up to INLINE bytes   at once, on the event loop
up to LARGE bytes    in a thread, one after another
more                 in another thread, one after another; then memory is given back

The tokenizers package takes some 200 bytes of memory and a microsecond for each byte of a text.
"""

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from shared.errors import QueueFull
from shared.limits import TEXT_WAITING
from shared.process import give_back

INLINE = 4096
LARGE = 256 << 10
OVER_AFTER = 2.0
"""Seconds after a large text in which its request is over, as a rule."""

ResultT = TypeVar("ResultT")


class Encoding:
    """For all models of a gateway."""

    def __init__(self, waiting_bytes: int = TEXT_WAITING.value) -> None:
        self._most = waiting_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._tidying: asyncio.TimerHandle | None = None
        self._small, self._large = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"tokenize-{name}")
            for name in ("small", "large")
        )

    async def run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """`work` on a text of `size` bytes. Raises `QueueFull`."""
        if size <= INLINE:
            return work()
        if self._bytes and self._bytes + size > self._most:
            raise QueueFull(
                f"{self._bytes:,} bytes of text wait to be tokenized; try again in a moment, or send less "
                f"({TEXT_WAITING.cited(self._most)}).",
                retry_after=1,
            )
        if size <= LARGE:
            return await self._in(self._small, size, work)
        try:
            return await self._in(self._large, size, _tidied(work))
        finally:
            self._tidy_later()

    async def _in(self, pool: ThreadPoolExecutor, size: int, work: Callable[[], ResultT]) -> ResultT:
        with self._lock:
            self._bytes += size
        future = pool.submit(work)
        future.add_done_callback(functools.partial(self._done, size))
        return await asyncio.wrap_future(future)

    def _tidy_later(self) -> None:
        """By then the request is over: its text and its tokens are gone as well."""
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(OVER_AFTER, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        with suppress(RuntimeError):  # the gateway stops
            self._small.submit(give_back)

    def _done(self, size: int, future: "Future[ResultT]") -> None:
        """Also where it was given up before it began; one that has begun counts until its end."""
        with self._lock:
            self._bytes -= size

    def stop(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


def _tidied(work: Callable[[], ResultT]) -> Callable[[], ResultT]:
    def run() -> ResultT:
        try:
            return work()
        finally:
            give_back()

    return run
