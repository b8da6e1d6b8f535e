"""Tokenizing beside the event loop, a bounded amount at a time.

up to INLINE bytes   at once, on the event loop
up to LARGE bytes    in a thread, one after another, each tenant in turn
more                 in another thread, as well; then memory is given back

The tokenizers package takes some 200 bytes of memory and a microsecond for each byte of a text.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from services.gateway.core.tenant_pool import Bound, TenantPool
from shared.limits import TEXT_WAITING
from shared.process import give_back
from shared.tasks import RoundRobin

INLINE = 4096
LARGE = 256 << 10
OVER_AFTER = 2.0  # seconds after a large text in which its request is over, as a rule

ResultT = TypeVar("ResultT")


class Encoding:
    """For all models of a gateway."""

    def __init__(self, waiting_bytes: int = TEXT_WAITING.value) -> None:
        self._waiting = TenantPool(Bound(TEXT_WAITING, waiting_bytes), "texts to tokenize")
        self._tidying: asyncio.TimerHandle | None = None
        self._small, self._large = (_Thread(f"tokenize-{name}", self._waiting) for name in ("small", "large"))

    async def run(self, size: int, work: Callable[[], ResultT], tenant: str = "") -> ResultT:
        """`work` on a text of `size` bytes, in the turn of `tenant`. Raises `QueueFull`."""
        if size <= INLINE:
            return work()
        if size <= LARGE:
            return await self._small.run(tenant, size, work)
        try:
            return await self._large.run(tenant, size, _tidied(work))
        finally:
            self._tidy_later()

    def _tidy_later(self) -> None:
        """By then the request is over: its text and its tokens are gone as well."""
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(OVER_AFTER, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        with suppress(RuntimeError):  # the gateway stops
            self._small.pool.submit(give_back)

    def stop(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        for thread in (self._small, self._large):
            thread.stop()


class _Job(NamedTuple):
    tenant: str
    size: int
    work: Callable[[], Any]
    result: "asyncio.Future[Any]"


class _Thread:
    """Does one job after another, each tenant's in turn."""

    def __init__(self, name: str, waiting: TenantPool) -> None:
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting = waiting
        self._turns: RoundRobin[_Job] = RoundRobin()
        self._working: asyncio.Task[None] | None = None

    async def run(self, tenant: str, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Raises `QueueFull`. One that is given up counts until its turn, one that has begun until its end: for so long
        its text is held."""
        self._waiting.take(tenant, size)
        loop = asyncio.get_running_loop()
        job = _Job(tenant, size, work, loop.create_future())
        self._turns.add(tenant, job)
        if self._working is None or self._working.done():
            self._working = loop.create_task(self._work())
        found: ResultT = await job.result
        return found

    async def _work(self) -> None:
        while (job := self._turns.next()) is not None:
            try:
                if not job.result.done():
                    await self._do(job)
            finally:
                self._waiting.give_back(job.tenant, job.size)

    async def _do(self, job: _Job) -> None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self.pool, job.work)
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
        except BaseException:  # the gateway stops
            job.result.cancel()
            raise
        else:
            if not job.result.done():
                job.result.set_result(found)

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        while (job := self._turns.next()) is not None:
            job.result.cancel()


def _tidied(work: Callable[[], ResultT]) -> Callable[[], ResultT]:
    def run() -> ResultT:
        try:
            return work()
        finally:
            give_back()

    return run
