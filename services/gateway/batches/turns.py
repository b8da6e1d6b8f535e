"""Whose batch comes next, and whose makes room. Pure; times are monotonic seconds.

    waiting ──tenant that has the fewest running here, then the one served longest ago, then the oldest──▶ runs
    every place taken, and a tenant waits that has fewer than another ──▶ the other's longest-running batch
                                                                          goes back to the waiting ones

So a tenant's hundred batches hold up nobody else's: tenants take turns, however many batches each has.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SHORT_TURN = 10.0
"""Seconds that a batch runs at least where its tenant has two more than the one that waits."""
TURN = 600.0
"""Seconds that it runs at least where its tenant has one more: tenants take turns then."""


class Waiting(NamedTuple):
    """A batch that nobody runs."""

    key: str
    tenant: str
    created_at: float


class Running(NamedTuple):
    """A batch that runs here."""

    key: str
    tenant: str
    began: float


def next_of(
    waiting: Iterable[Waiting], running: Iterable[Running], served: Mapping[str, float]
) -> Waiting | None:
    """The one to run next. `served`: when a batch of each tenant began here last."""
    busy = Counter(item.tenant for item in running)
    return min(
        waiting,
        key=lambda item: (busy[item.tenant], served.get(item.tenant, 0.0), item.created_at, item.key),
        default=None,
    )


def to_yield(waiting: Iterable[Waiting], running: Iterable[Running], now: float) -> Running | None:
    """The running one that makes room for one that waits; None: all is fair, or it is too soon."""
    running = list(running)
    busy = Counter(item.tenant for item in running)
    least = min((busy[item.tenant] for item in waiting), default=None)
    if least is None or not running:
        return None
    most = max(busy.values())
    if most <= least:
        return None
    longest = min((item for item in running if busy[item.tenant] == most), key=lambda item: item.began)
    return longest if now - longest.began >= (TURN if most == least + 1 else SHORT_TURN) else None
