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
from typing import TypeVar

from shared.errors import QueueFull
from shared.memory import give_back

INLINE = 4096
LARGE = 256 << 10
WAITING_BYTES = 32 << 20
"""Text that may wait to be tokenized, in UTF-8; more is refused for the moment."""

ResultT = TypeVar("ResultT")


class Encoding:
    """For all models of a gateway."""

    def __init__(self, waiting_bytes: int = WAITING_BYTES) -> None:
        self._most = waiting_bytes
        self._bytes = 0
        self._lock = threading.Lock()
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
                f"{self._bytes >> 10} KiB of text wait to be tokenized, and {self._most >> 10} KiB may; try again in a "
                "moment, or send less.",
                retry_after=1,
            )
        with self._lock:
            self._bytes += size
        pool, job = (self._large, _tidied(work)) if size > LARGE else (self._small, work)
        future = pool.submit(job)
        future.add_done_callback(functools.partial(self._done, size))
        return await asyncio.wrap_future(future)

    def _done(self, size: int, future: "Future[ResultT]") -> None:
        """Also where it was given up before it began; one that has begun counts until its end."""
        with self._lock:
            self._bytes -= size

    def stop(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


def _tidied(work: Callable[[], ResultT]) -> Callable[[], ResultT]:
    def run() -> ResultT:
        try:
            return work()
        finally:
            give_back()

    return run
