"""Whether the grammars of requests compile, which is seen once of each.

All tenants share one compiler: they take turns (`shared/tasks.py`), at most so many waiting, of a tenant and of all,
each tenant with a share of the compiler's time.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from services.gateway.core.errors import InvalidParameter, RateLimited
from services.gateway.intake.sampling.structured_output import RequestedGrammar, wanted_by
from services.gateway.intake.schemas import GenerationFields
from shared.errors import QueueFull
from shared.grammars import ANY_OBJECT, CPU_SECONDS, GrammarCheck, GrammarVerdict
from shared.limits import GRAMMAR_SECONDS, GRAMMARS_WAITING, TENANT_GRAMMARS
from shared.messages import Grammar
from shared.tasks import RoundRobin

KEPT_VERDICTS = 256


class _Job(NamedTuple):
    """A grammar that somebody waits for."""

    tenant: str
    grammar: Grammar
    verdict: asyncio.Future[GrammarVerdict]


class GrammarChecker:
    """Grammars of requests, each compiled once to see whether it can be; the verdicts are remembered. Tenants take
    turns."""

    def __init__(self) -> None:
        self._check = GrammarCheck()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._turns: GrammarTurns[_Job] = GrammarTurns()
        self._working: asyncio.Task[None] | None = None

    async def of(self, request: GenerationFields, tenant: str = "", *, closes: bool = True) -> Grammar | None:
        """What the answer to `request` must match; None: nothing. `closes`: as of `wanted_by`. Raises
        `InvalidParameter`, `QueueFull`, `RateLimited`."""
        wanted = wanted_by(request, closes=closes)
        return None if wanted is None else await self.checked(wanted, tenant)

    async def checked(
        self, wanted: RequestedGrammar, tenant: str = "", parts: Iterable[RequestedGrammar] = ()
    ) -> Grammar:
        """The grammar to send to a ring. `tenant`: whose turn and time it is; `parts`: of `wanted`. Raises
        `InvalidParameter` when it does not compile, of the part that does not, `QueueFull`, `RateLimited`."""
        if wanted.grammar is ANY_OBJECT:
            return ANY_OBJECT
        key = hashlib.sha256(msgspec.msgpack.encode(wanted.grammar)).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._ask(wanted.grammar, tenant)
            self._verdicts[key] = verdict
            if len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict.grammar is None:
            for part in parts:
                await self.checked(part, tenant)
            raise InvalidParameter(
                f"{wanted.subject}: {verdict.problem}.", param=wanted.param, reason="invalid_grammar"
            )
        return verdict.grammar

    async def _ask(self, grammar: Grammar, tenant: str) -> GrammarVerdict:
        job = _Job(tenant, grammar, asyncio.get_running_loop().create_future())
        self._turns.admit(tenant, job, time.monotonic())
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await job.verdict

    async def _work(self) -> None:
        """Compiles what waits, one after the other."""
        loop = asyncio.get_running_loop()
        while (job := self._turns.next()) is not None:
            if job.verdict.done():  # whoever waited has gone
                continue
            began = time.monotonic()
            try:
                verdict = await loop.run_in_executor(self._thread, self._check.check, job.grammar)
            except BaseException:
                if not job.verdict.done():
                    job.verdict.cancel()
                raise
            now = time.monotonic()
            self._turns.spent(job.tenant, min(now - began, CPU_SECONDS), now)  # a busy machine is not its fault
            if not job.verdict.done():
                job.verdict.set_result(verdict)

    async def stop(self) -> None:
        """Ends the process that compiles."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._check.interrupt()
        self._thread.shutdown()
        self._check.close()


MINUTE = 60.0
Job = TypeVar("Job")


class GrammarTurns(RoundRobin[Job]):
    """Jobs of tenants that wait, and the seconds that each tenant's have taken within the last minute."""

    def __init__(self) -> None:
        super().__init__()
        # By tenant: when a job ended, and the seconds that it took.
        self._spent: dict[str, deque[tuple[float, float]]] = {}

    def admit(self, tenant: str, job: Job, now: float) -> None:
        """`now`: seconds of any steady clock. Raises `QueueFull` where too many wait, `RateLimited` where the
        tenant's have taken too long."""
        for limit, count in ((GRAMMARS_WAITING, len(self)), (TENANT_GRAMMARS, self.of(tenant))):
            if count >= limit.value:
                raise QueueFull(
                    f"{count} new schemas and grammars wait to be compiled; try again in a moment ({limit.cited()}).",
                    retry_after=1,
                )
        if wait := self._until_free(tenant, now):
            raise RateLimited(
                "Your schemas and grammars took too long to compile within a minute; use those that were compiled "
                f"before, or try again in {wait:.0f} s ({GRAMMAR_SECONDS.cited()}).",
                kind="requests",
                wait=wait,
            )
        self.add(tenant, job)

    def spent(self, tenant: str, seconds: float, now: float) -> None:
        """A job of `tenant` took `seconds` and has ended `now`."""
        self._forget(now)
        self._spent.setdefault(tenant, deque()).append((now, seconds))

    def _until_free(self, tenant: str, now: float) -> float:
        """Seconds until it has time left; 0: it has some."""
        self._forget(now)
        spent = self._spent.get(tenant, ())
        over = sum(seconds for _, seconds in spent) - GRAMMAR_SECONDS.value
        for ended, seconds in spent:
            if over < 0:
                break
            over -= seconds
            if over < 0:
                return ended + MINUTE - now
        return 0.0

    def _forget(self, now: float) -> None:
        for tenant in list(self._spent):
            spent = self._spent[tenant]
            while spent and spent[0][0] <= now - MINUTE:
                spent.popleft()
            if not spent:
                del self._spent[tenant]
