"""The queue gives out the right request: most urgent lane first, first come first served, none twice."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.fair_queue import RequestQueue
from services.scheduler.request import WaitingRequest
from shared.messages import LANES, Lane
from tests.unit.scheduler.requests import waiting


def drain(queue: RequestQueue, model: str = "m") -> list[str]:
    names = []
    while (item := queue.peek(model)) is not None:
        queue.take(item)
        names.append(item.generation_id)
    return names


def test_lanes_go_by_urgency_and_each_by_arrival() -> None:
    queue = RequestQueue()
    lanes: list[Lane] = ["batch", "interactive", "recovery", "batch", "interactive", "recovery"]
    for order, lane in enumerate(lanes):
        queue.push(waiting(f"{lane}-{order}", lane=lane, order=order))
    assert [queue.depth_of("m", lane) for lane in LANES] == [2, 2, 2]
    expected = ["recovery-2", "recovery-5", "interactive-1", "interactive-4", "batch-0", "batch-3"]
    assert drain(queue) == expected
    assert len(queue) == 0
    assert queue.models() == []


def test_a_returned_request_has_its_old_place() -> None:
    queue = RequestQueue()
    first, second = waiting("a", order=1), waiting("b", order=2)
    queue.push(first)
    queue.push(second)
    queue.take(first)
    queue.push(first)
    assert drain(queue) == ["a", "b"]


def test_who_waits_for_a_few_groups_is_in_nobodys_way() -> None:
    """Of a kind of sparse attention that no group has room for now; asking with it again finds all in their order."""
    queue = RequestQueue()
    kinds: list[tuple[str, Any, Any]] = [
        ("a", "pages", "interactive"),
        ("b", "", "interactive"),
        ("c", "pages", "recovery"),
        ("d", "window", "batch"),
    ]
    for order, (name, kind, lane) in enumerate(kinds):
        queue.push(waiting(name, order=order, sparse=kind, lane=lane))
    found = [
        item.generation_id if (item := queue.peek("m", without)) is not None else None
        for without in ({"pages"}, {"pages", ""}, {"pages", "window", ""}, set[str]())
    ]
    assert found == ["b", "d", None, "c"]
    assert drain(queue) == ["c", "a", "b", "d"]


def test_models_do_not_wait_for_each_other() -> None:
    queue = RequestQueue()
    queue.push(waiting("a", model="one", order=1))
    queue.push(waiting("b", model="two", order=2))
    assert sorted(queue.models()) == ["one", "two"]
    assert drain(queue, "two") == ["b"]
    assert drain(queue, "unknown") == []
    assert queue.models() == ["one"]


def test_only_the_newest_attempt_of_a_generation_waits() -> None:
    queue = RequestQueue()
    old, new = waiting("a", attempt=0, order=1), waiting("a", attempt=1, order=2, lane="recovery")
    assert queue.push(old) is None
    assert queue.push(waiting("a", attempt=0, order=3)) is not None
    assert queue.push(new) is old
    assert queue.push(old) is old
    assert queue.peek("m") is new
    assert len(queue) == 1


def test_expired_requests_come_out_once_earliest_first() -> None:
    queue = RequestQueue()
    for name, deadline in (("late", 30.0), ("soon", 10.0), ("never", 0.0), ("next", 20.0)):
        queue.push(waiting(name, deadline=deadline))
    assert queue.expire(9.9) == []
    assert [item.generation_id for item in queue.expire(20.0)] == ["soon", "next"]
    assert queue.expire(20.0) == []
    assert sorted(drain(queue)) == ["late", "never"]


@given(st.lists(st.integers(0, 999), unique=True, min_size=200, max_size=300))
def test_removed_requests_are_swept_out_of_memory(orders: list[int]) -> None:
    queue = RequestQueue()
    for order in orders:
        queue.push(waiting(str(order), order=order, deadline=1e9 + order))
        assert queue.remove(str(order)) is not None
    assert len(queue._deadlines._entries) <= 66
    assert len(queue._lanes["m"]["interactive"]._tenants[""].waiting[""]._entries) <= 66


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list that is sorted anew for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: dict[str, WaitingRequest] = {}
        self.taken: list[WaitingRequest] = []
        self.orders = 0

    @rule(name=st.integers(0, 20), lane=st.sampled_from(LANES), attempt=st.integers(0, 3), due=st.integers(0, 9))
    def push(self, name: int, lane: Lane, attempt: int, due: int) -> None:
        self.orders += 1
        item = waiting(str(name), lane=lane, order=self.orders, attempt=attempt, deadline=float(due))
        self._push(item)

    def _push(self, item: WaitingRequest) -> None:
        other = self.model.get(item.generation_id)
        displaced = self.queue.push(item)
        if other is None:
            assert displaced is None
        else:
            assert displaced is (item if item.attempt <= other.attempt else other)
        if displaced is not item:
            self.model[item.generation_id] = item

    @rule()
    def take(self) -> None:
        item = self.queue.peek("m")
        expected = min(self.model.values(), key=lambda item: (LANES.index(item.lane), item.order), default=None)
        assert item is expected
        if item is not None:
            self.queue.take(item)
            del self.model[item.generation_id]
            self.taken.append(item)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        self._push(self.taken.pop())

    @rule(name=st.integers(0, 20))
    def remove(self, name: int) -> None:
        assert self.queue.remove(str(name)) is self.model.pop(str(name), None)

    @rule(now=st.integers(1, 9))
    def expire(self, now: int) -> None:
        expired = self.queue.expire(float(now))
        due = {name for name, item in self.model.items() if 0 < item.deadline <= now}
        assert {item.generation_id for item in expired} == due
        assert [item.deadline for item in expired] == sorted(item.deadline for item in expired)
        for name in due:
            del self.model[name]

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == len(self.model)
        for lane in LANES:
            count = sum(item.lane == lane for item in self.model.values())
            assert self.queue.depth_of("m", lane) == count
            assert self.queue.depth_of("other", lane) == 0


TestQueueMachine = QueueMachine.TestCase
