"""What the requests of a gateway hold of something at a time: all of them no more than a limit, and each tenant's no
more than a share of it, so that no tenant's requests have another's refused. Pure.

    take ──▶ held by tenant ──▶ give_back
      └──▶ `QueueFull`: the tenant's share is used up, or the whole limit
"""

from collections import Counter
from typing import NamedTuple

from shared.errors import QueueFull
from shared.limits import Limit

SHARE = 4  # of a limit without a limit for tenants beside it, each has one part in so many


class Bound(NamedTuple):
    """A limit as it is set."""

    limit: Limit
    most: int

    @property
    def cited(self) -> str:
        return self.limit.cited(self.most)


class TenantPool:
    """Where nobody has a key there is one tenant, without a name, and it has all."""

    def __init__(self, whole: Bound, what: str, share: Bound | None = None, *, strict: bool = False) -> None:
        """`what`: what is held, as a refusal calls it; `share`: of each tenant, None: a part of the whole; `strict`:
        also a request beside which nothing is held is refused beyond the limits."""
        self._whole, self._what, self._strict = whole, what, strict
        self._share = whole.most // SHARE if share is None else share.most
        self._share_cited = f"{whole.cited}, a quarter for a tenant" if share is None else share.cited
        self._held: Counter[str] = Counter()
        self._total = 0

    def check(self, tenant: str, size: int, held: int = 0) -> None:
        """Whether there is room for `size` more. Raises `QueueFull`. `held`: what the same request has taken before."""
        mine, total = self._held[tenant], self._total
        if tenant and mine + size > self._share and (self._strict or mine > held):
            raise self._full(f"your other requests hold {mine - held:,}", self._share_cited)
        if total + size > self._whole.most and (self._strict or total > held):
            raise self._full(f"other requests hold {total - held:,}", self._whole.cited)

    def take(self, tenant: str, size: int, held: int = 0) -> None:
        """Raises as `check`."""
        self.check(tenant, size, held)
        self.hold(tenant, size)

    def hold(self, tenant: str, size: int) -> None:
        """As `take`, of what was admitted elsewhere: it is never refused."""
        self._held[tenant] += size
        self._total += size

    def give_back(self, tenant: str, size: int) -> None:
        self._held[tenant] -= size
        self._total -= size
        if self._held[tenant] <= 0:
            del self._held[tenant]

    def _full(self, why: str, cited: str) -> QueueFull:
        return QueueFull(
            f"The gateway has no room for more {self._what}: {why}; try again in a moment ({cited}).", retry_after=1
        )
