"""No tenant starves: those that wait all the time are served alike in tokens, to within one quantum."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.fair_queue import FairQueue
from services.scheduler.request import WaitingRequest
from tests.unit.scheduler.requests import waiting

QUANTUM = 1000


class Served:
    """A queue, and who has been served how much."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.queue = FairQueue(lambda item: item.generation_id in self.waiting, QUANTUM)
        self.tokens: dict[str, int] = {}
        self._numbers = itertools.count()

    def push(self, tenant: str, cost: int, due: float = 0.0, priority: int = 0) -> WaitingRequest:
        number = next(self._numbers)
        item = waiting(str(number), tenant=tenant, cost=cost, order=number, due=due, priority=priority)
        self.push_again(item)
        return item

    def push_again(self, item: WaitingRequest) -> None:
        self.waiting.add(item.generation_id)
        self.queue.push(item)

    def serve(self) -> WaitingRequest | None:
        item = self.queue.peek()
        assert item is self.queue.peek(), "asking changes nothing"
        if item is not None:
            if not item.paid:
                self.tokens[item.tenant] = self.tokens.get(item.tenant, 0) + item.cost
            self.queue.charge(item)
            self.waiting.discard(item.generation_id)
        return item


costs = st.lists(st.integers(1, QUANTUM), min_size=1, max_size=8)


@given(st.lists(costs, min_size=2, max_size=6), st.integers(1, 200))
def test_tenants_that_wait_all_the_time_are_served_within_one_quantum_and_one_request(
    of_tenants: list[list[int]], rounds: int
) -> None:
    served = Served()
    supply = {str(tenant): itertools.cycle(costs) for tenant, costs in enumerate(of_tenants)}
    for tenant, costs in supply.items():
        served.push(tenant, next(costs))
        served.push(tenant, next(costs))
    for _ in range(rounds):
        item = served.serve()
        served.push(item.tenant, next(supply[item.tenant]))
        for tenant in supply:
            assert 0 <= served.queue.balance(tenant) < 2 * QUANTUM
    tokens = [served.tokens.get(tenant, 0) for tenant in supply]
    largest = max(max(costs) for costs in of_tenants)
    assert max(tokens) - min(tokens) <= QUANTUM + largest


@given(st.integers(1, 20 * QUANTUM), st.integers(50, 200))
def test_a_request_of_many_quanta_is_served_after_as_many_rounds(large: int, small: int) -> None:
    served = Served()
    served.push("large", large)
    for _ in range((large + 2 * QUANTUM) // small + 2):
        served.push("small", small)
    while (item := served.serve()) is not None and item.tenant == "small":
        assert served.tokens["small"] <= large + 2 * QUANTUM, "the other one starves"
    assert item is not None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5 * QUANTUM), st.booleans()), max_size=30))
def test_tenants_with_nothing_else_are_passed_by(requests: list[tuple[str, int, bool]]) -> None:
    """And go on in their order once what they need has room."""
    served = Served()
    items = [served.push(tenant, cost) for tenant, cost, _ in requests]
    for item, (_, _, sparse) in zip(items, requests, strict=True):
        item.sparse = "pages" if sparse else ""
    fresh = Served()
    for item in items:
        fresh.push_again(item)
    dense = [item.generation_id for item in items if not item.sparse]
    taken = []
    while (item_now := fresh.queue.peek({"pages"})) is not None:
        fresh.queue.charge(item_now)
        fresh.waiting.discard(item_now.generation_id)
        taken.append(item_now.generation_id)
    assert sorted(taken) == sorted(dense)
    left = []
    while (item_now := fresh.serve()) is not None:
        left.append(item_now.generation_id)
    assert sorted(taken + left, key=int) == [item.generation_id for item in items]
    for tenant in "ab":
        own = [item.generation_id for item in items if item.tenant == tenant and item.sparse]
        assert [name for name in left if name in own] == own


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    served = Served()
    for _ in range(1000):
        served.push("flood", 500)
    served.serve()
    guest = served.push("guest", 500)
    before = 0
    while served.serve() is not guest:
        before += 1
    assert before <= 2


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    served = Served()
    served.push("a", 1)
    served.push("b", 1)
    while served.serve() is not None:
        pass
    assert served.queue.balance("a") == served.queue.balance("b") == 0


def test_of_a_tenant_the_request_that_is_due_first_goes_first() -> None:
    served = Served()
    for due in (30.0, 10.0, 20.0, 10.0):
        served.push("a", 10, due)
    found = [item for _ in range(4) if (item := served.serve()) is not None]
    assert [(item.due, item.order) for item in found] == [(10.0, 1), (10.0, 3), (20.0, 2), (30.0, 0)]


def test_a_request_that_comes_back_is_not_charged_twice() -> None:
    served = Served()
    item = served.push("a", 700)
    served.push("a", 700)
    assert served.serve() is item
    balance = served.queue.balance("a")
    served.push_again(item)
    assert served.serve() is item
    assert served.queue.balance("a") == balance


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.booleans()), max_size=100))
def test_everything_is_served_once(requests: list[tuple[str, int, bool]]) -> None:
    served = Served()
    expected = set()
    for tenant, cost, leaves in requests:
        item = served.push(tenant, cost)
        if leaves:
            served.waiting.discard(item.generation_id)
        else:
            expected.add(item.generation_id)
    found = []
    while (each := served.serve()) is not None:
        found.append(each.generation_id)
    assert sorted(found) == sorted(expected)
    assert not served.queue._tenants


def test_a_priority_holds_among_a_tenants_own_requests_alone() -> None:
    served = Served()
    late, other = served.push("a", QUANTUM, due=1.0), served.push("b", QUANTUM)
    urgent = served.push("a", QUANTUM, due=9.0, priority=-1)
    least = served.push("a", QUANTUM, priority=5)
    order = [served.serve() for _ in range(4)]
    assert order.index(urgent) < order.index(late) < order.index(least)
    assert order.index(other) <= 1
