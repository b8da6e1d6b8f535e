"""Requests that wait for a group: by model and lane, most urgent lane first, fair among tenants within a lane.

    model ─┬─ recovery     ▶▶▶ ─┐
           ├─ interactive  ▶▶▶▶▶├─▶ peek, take
           └─ batch        ▶▶▶▶ ┘

Invariant: a generation waits at most once, with its newest attempt.

Within a lane it is deficit round robin by tokens (Shreedhar and Varghese, 1995).

    turn ▶ tenant a   balance 5,000   [ due soonest ▶ ... ]     each round adds QUANTUM tokens to a tenant's
           tenant b   balance   300   [ ... ]                   balance; a request goes when its cost is covered
           tenant c   balance 4,100   [ ... ]

Invariants: a tenant's balance stays below QUANTUM plus the cost of its first request, so tenants that wait all
the time are served within one QUANTUM and one request of each other, whatever they ask; a tenant without
requests keeps no balance. Within a tenant the least `priority` goes first, of these the request that is due first (its
deadline; without one, PATIENCE after it was published), then the one that came first.

Each operation costs O(log n) in the tenant's own requests; a request of more than QUANTUM tokens waits for
as many rounds as it costs quanta.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from services.scheduler.request import WaitingRequest
from shared.messages import LANES, Lane

QUANTUM = 4096  # tokens
Urgency = tuple[int, float]  # priority, and unix seconds; the least first


def _urgency(item: WaitingRequest) -> tuple[int, float, int]:
    return item.priority, item.due, item.order


class RequestHeap:
    """Requests by key. Those that left the queue otherwise are skipped and swept."""

    __slots__ = ("_alive", "_entries", "_pushed", "_sweep_at")

    def __init__(self, alive: Callable[[WaitingRequest], bool]) -> None:
        self._alive = alive
        self._entries: list[tuple[Urgency, int, int, WaitingRequest]] = []
        self._pushed = 0
        self._sweep_at = 64

    def push(self, key: Urgency, order: int, item: WaitingRequest) -> None:
        self._pushed += 1
        heapq.heappush(self._entries, (key, order, self._pushed, item))
        if len(self._entries) > self._sweep_at:
            self._entries = [entry for entry in self._entries if self._alive(entry[3])]
            heapq.heapify(self._entries)
            self._sweep_at = 64 + 2 * len(self._entries)

    def first(self) -> WaitingRequest | None:
        while self._entries:
            item = self._entries[0][3]
            if self._alive(item):
                return item
            heapq.heappop(self._entries)
        return None


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    # By the kind of sparse attention that the requests need; empty: none.
    waiting: dict[str, RequestHeap] = field(default_factory=dict)
    balance: int = 0
    had_turn: bool = False  # whether this turn's quantum has been added

    def first(self, without: Container[str]) -> WaitingRequest | None:
        found = (heap.first() for kind, heap in self.waiting.items() if kind not in without)
        return min((item for item in found if item is not None), key=_urgency, default=None)


class FairQueue:
    """Waiting requests of one lane and model. Does not know which of them left otherwise: it asks `alive`."""

    def __init__(self, alive: Callable[[WaitingRequest], bool], quantum: int = QUANTUM) -> None:
        self._alive = alive
        self._quantum = quantum
        self._tenants: dict[str, _Tenant] = {}
        self._turns: deque[_Tenant] = deque()

    def push(self, item: WaitingRequest) -> None:
        tenant = self._tenants.get(item.tenant)
        if tenant is None:
            tenant = self._tenants[item.tenant] = _Tenant(item.tenant)
            self._turns.append(tenant)
        if item.sparse not in tenant.waiting:
            tenant.waiting[item.sparse] = RequestHeap(self._alive)
        tenant.waiting[item.sparse].push((item.priority, item.due), item.order, item)

    def peek(self, without: Container[str] = ()) -> WaitingRequest | None:
        """The request whose turn it is, of those that need none of the kinds `without` of sparse attention. Asking
        again gives the same one while nothing changes."""
        passed = 0  # tenants in a row all of whose requests need such a kind
        while passed < len(self._turns):
            tenant = self._turns[0]
            item = tenant.first(without)
            if item is None and tenant.first(()) is None:
                self._turns.popleft()
                del self._tenants[tenant.name]
                continue
            if item is None:
                passed += 1
                self._turns.rotate(-1)
                continue
            passed = 0
            if not tenant.had_turn:
                tenant.balance += self._quantum
                tenant.had_turn = True
            if self._price(item) <= tenant.balance:
                return item
            tenant.had_turn = False
            self._turns.rotate(-1)
        return None

    def charge(self, item: WaitingRequest) -> None:
        """`item`, which `peek` gave, is taken."""
        tenant = self._tenants[item.tenant]
        tenant.balance -= self._price(item)
        item.paid = True

    def balance(self, tenant: str) -> int:
        """Tokens that a waiting tenant has not used of its share; 0 for one that does not wait."""
        found = self._tenants.get(tenant)
        return found.balance if found is not None else 0

    @staticmethod
    def _price(item: WaitingRequest) -> int:
        return 0 if item.paid else item.cost


class RequestQueue:
    """Waiting requests. Knows no clock: `expire` is told the time."""

    def __init__(self) -> None:
        self._by_id: dict[str, WaitingRequest] = {}
        self._lanes: dict[str, dict[Lane, FairQueue]] = {}
        self._deadlines = RequestHeap(self._waits)
        self._depth_of: Counter[tuple[str, Lane]] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def depth_of(self, model: str, lane: Lane) -> int:
        """Requests of one lane that wait for `model`."""
        return self._depth_of[model, lane]

    @property
    def depths(self) -> Mapping[tuple[str, Lane], int]:
        """Requests by model and lane, of those that have any. Not to be changed."""
        return self._depth_of

    def models(self) -> list[str]:
        """Models that requests wait for."""
        return list(self._lanes)

    def push(self, item: WaitingRequest) -> WaitingRequest | None:
        """Lets `item` wait. Returns the request that has no place any more: an older attempt of the
        same generation, `item` itself where it is the older or the same one, or None."""
        other = self._by_id.get(item.generation_id)
        if other is not None:
            if item.attempt <= other.attempt:
                return item
            self._drop(other)
        self._by_id[item.generation_id] = item
        self._depth_of[item.model, item.lane] += 1
        lanes = self._lanes.setdefault(item.model, {})
        if item.lane not in lanes:
            lanes[item.lane] = FairQueue(self._waits)
        lanes[item.lane].push(item)
        if item.deadline:
            self._deadlines.push((0, item.deadline), item.order, item)
        return other

    def peek(self, model: str, without: Container[str] = ()) -> WaitingRequest | None:
        """As `FairQueue.peek`, of the most urgent lane that has one."""
        lanes = self._lanes.get(model, {})
        waits = False
        for lane in LANES:
            if self._depth_of.get((model, lane)):
                if (item := lanes[lane].peek(without)) is not None:
                    return item
                waits = True
        if not waits:
            self._lanes.pop(model, None)
        return None

    def take(self, item: WaitingRequest) -> None:
        """Takes out the request that `peek` gave, and charges its tenant."""
        assert self._waits(item), "only a waiting request can be taken"
        self._lanes[item.model][item.lane].charge(item)
        self._drop(item)

    def get(self, generation_id: str) -> WaitingRequest | None:
        """The request of a generation; None when it does not wait here."""
        return self._by_id.get(generation_id)

    def of(self, model: str) -> list[WaitingRequest]:
        """All that wait for `model`, in no order."""
        return [item for item in self._by_id.values() if item.model == model]

    def remove(self, generation_id: str) -> WaitingRequest | None:
        """Takes out the request of a generation; None when it does not wait here."""
        item = self._by_id.get(generation_id)
        if item is not None:
            self._drop(item)
        return item

    def expire(self, now: float) -> list[WaitingRequest]:
        """Takes out the requests whose deadline is not after `now` (unix seconds), earliest first."""
        expired = []
        while (first := self._deadlines.first()) is not None and first.deadline <= now:
            self._drop(first)
            expired.append(first)
        return expired

    def _waits(self, item: WaitingRequest) -> bool:
        return self._by_id.get(item.generation_id) is item

    def _drop(self, item: WaitingRequest) -> None:
        del self._by_id[item.generation_id]
        key = item.model, item.lane
        self._depth_of[key] -= 1
        if not self._depth_of[key]:
            del self._depth_of[key]
