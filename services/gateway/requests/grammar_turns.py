"""Whose grammar is compiled next, where all tenants share one compiler: in turn (`shared/tasks.py`), at most so many
waiting, of a tenant and of all, each tenant with a share of the compiler's time. Pure."""

from collections import deque
from typing import Generic, TypeVar

from services.gateway.errors import RateLimited
from shared.errors import QueueFull
from shared.limits import GRAMMAR_SECONDS, GRAMMARS_WAITING, TENANT_GRAMMARS
from shared.tasks import RoundRobin

MINUTE = 60.0

Job = TypeVar("Job")


class GrammarTurns(Generic[Job]):
    """Jobs of tenants that wait, and the seconds that each tenant's have taken within the last minute."""

    def __init__(self) -> None:
        self._turns: RoundRobin[Job] = RoundRobin()
        self._spent: dict[str, deque[tuple[float, float]]] = {}
        """By tenant: when a job ended, and the seconds that it took."""

    def add(self, tenant: str, job: Job, now: float) -> None:
        """`now`: seconds of any steady clock. Raises `QueueFull` where too many wait, `RateLimited` where the
        tenant's have taken too long."""
        for limit, count in (
            (GRAMMARS_WAITING, self.waiting),
            (TENANT_GRAMMARS, self._turns.of(tenant)),
        ):
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
        self._turns.add(tenant, job)

    def next(self) -> Job | None:
        """The job whose turn it is; None: none waits."""
        return self._turns.next()

    @property
    def waiting(self) -> int:
        return len(self._turns)

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
