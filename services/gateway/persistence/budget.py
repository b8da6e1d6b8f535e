"""What one request may make of what is stored: bytes as they cost, decompressed and once for each use. Pure, but for
`beside_loop`, by which work above a set cost leaves the event loop.

    stored response ──inflated──▶ `reads`        items of it that the request has ──each use──▶ `items`
                                     └──────── what the gateway's requests hold together ───────────┘
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

from services.gateway.core.tenant_pool import Bound, TenantPool
from shared import limits
from shared.errors import PayloadTooLarge
from shared.limits import Limit

P = ParamSpec("P")
T = TypeVar("T")

# Bytes from which what is stored is deflated, inflated, read and written beside the event loop.
LARGE = 64 << 10


class ByteBudget:
    """Bytes that are used up, and never given back."""

    def __init__(
        self, limit: Limit, most: int | None = None, hold: Callable[[int], object] = lambda size: None
    ) -> None:
        """`most`: the limit as it is set; `hold` is told what is used, before it is."""
        self.limit = limit
        self.most = limit.value if most is None else most
        self.used = 0
        self._hold = hold

    @property
    def left(self) -> int:
        return max(0, self.most - self.used)

    @property
    def cited(self) -> str:
        """How a refusal names the limit."""
        return self.limit.cited(self.most)

    def use(self, size: int) -> None:
        """For what is cut short by `left`, and refused by nothing here."""
        self._hold(size)
        self.used += size

    def charge(self, size: int, param: str | None = None) -> None:
        """Raises `PayloadTooLarge` beyond the limit. `param`: the field that asks for it."""
        if size > self.left:
            raise PayloadTooLarge(
                f"The stored items that this request asks for are too large together; ask for fewer of them "
                f"({self.cited}).",
                param=param,
            )
        self.use(size)


class _Holding:
    """What one request holds of the gateway's pool."""

    def __init__(self, pool: TenantPool, tenant: str) -> None:
        self._pool, self._tenant = pool, tenant
        self._items = self._read = 0

    def add_items(self, size: int) -> None:
        """Raises `QueueFull` where others hold too much."""
        self._take(size)
        self._items += size

    def read(self, size: int) -> None:
        """What was read last is held until the next is. Raises as `add_items`."""
        self._pool.give_back(self._tenant, self._read)
        self._read = 0
        self._take(size)
        self._read = size

    def _take(self, size: int) -> None:
        self._pool.take(self._tenant, size, self._items + self._read)

    def give_back(self) -> None:
        self._pool.give_back(self._tenant, self._items + self._read)


class HistoryBudget:
    """Of one request, as a context manager: what it reads and what is in it is held by the request. Charges raise
    `PayloadTooLarge`, and `QueueFull` where others hold too much."""

    def __init__(self, most: int, pool: TenantPool, tenant: str) -> None:
        """`most`: bytes of items."""
        self._holding = _Holding(pool, tenant)
        self.items = ByteBudget(limits.HISTORY_BYTES, most, self._holding.add_items)
        self.reads = ByteBudget(limits.HISTORY_READS, hold=self._holding.read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holding.give_back()


def history_pool(most: int) -> TenantPool:
    """`most`: bytes of stored items that the requests of a gateway hold at a time."""
    return TenantPool(Bound(limits.HISTORY_HELD, most), "stored items")


async def beside_loop(cost: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(*args, **kwargs)`, in a thread where its `cost` in bytes is large."""
    if cost < LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
