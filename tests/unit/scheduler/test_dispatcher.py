"""The batcher waits only while it is worth it, loses nothing, and keeps the order; a group has one batch to answer."""

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.scheduler.dispatcher import MAX_BATCH, Batcher, Dispatcher
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.rejections import Rejections
from services.scheduler.request import WaitingRequest
from shared.messages import DispatchReply, Refusal
from tests.unit.scheduler.requests import Settled, group, waiting
from tests.unit.scheduler.tables import FREE, known, table_of

WAIT = 0.005


def test_an_idle_group_gets_its_request_at_once() -> None:
    batcher = Batcher(WAIT, 1000)
    item = waiting("a")
    batcher.add("g", item, 10.0)
    assert batcher.take("g", 10.0, at_once=True) == [item]
    assert batcher.groups() == []
    assert batcher.due() is None


def test_a_busy_group_gets_a_batch_after_the_wait() -> None:
    batcher = Batcher(WAIT, 1000)
    for index in range(3):
        batcher.add("g", waiting(str(index)), 10.0 + index / 1000)
    assert batcher.take("g", 10.0049, at_once=False) == []
    assert batcher.due() == 10.0 + WAIT
    assert [item.generation_id for item in batcher.take("g", 10.0 + WAIT, at_once=False)] == ["0", "1", "2"]
    assert batcher.take("g", 11.0, at_once=True) == []


def test_a_full_batch_does_not_wait() -> None:
    batcher = Batcher(WAIT, 100_000)
    for index in range(MAX_BATCH + 1):
        batcher.add("g", waiting(str(index)), 10.0)
    assert len(batcher.take("g", 10.0, at_once=False)) == MAX_BATCH
    assert batcher.take("g", 10.0, at_once=False) == []
    assert len(batcher.take("g", 10.0 + WAIT, at_once=False)) == 1


def test_a_group_that_is_lost_gives_everything_back() -> None:
    batcher = Batcher(WAIT, 1000)
    items = [waiting(str(index)) for index in range(3)]
    for item in items:
        batcher.add("g", item, 0.0)
    batcher.add("other", waiting("x"), 0.0)
    assert batcher.take_back("g") == items
    assert batcher.take_back("g") == []
    assert batcher.groups() == ["other"]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 400), st.floats(0, 0.01)), max_size=400),
    st.integers(100, 1000),
)
def test_batches_are_bounded_in_order_and_complete(requests: list[tuple[str, int, float]], max_bytes: int) -> None:
    batcher = Batcher(WAIT, max_bytes)
    now, sent = 0.0, {"a": [], "b": []}  # type: tuple[float, dict[str, list[int]]]
    for order, (name, size, delay) in enumerate(requests):
        now += delay
        batcher.add(name, waiting(str(order), order=order, raw=b"x" * size), now)
        for destination in batcher.groups():
            while batch := batcher.take(destination, now, at_once=False):
                assert len(batch) <= MAX_BATCH
                assert len(batch) == 1 or sum(len(item.raw) for item in batch) <= max_bytes
                sent[destination] += [item.order for item in batch]
        due = batcher.due()
        assert due is None or due > now, "nothing waits longer than it may"
    for destination in batcher.groups():
        while batch := batcher.take(destination, now, at_once=True):
            sent[destination] += [item.order for item in batch]
    for name in "ab":
        assert sent[name] == [order for order, request in enumerate(requests) if request[0] == name]


class _Leader:
    """The bus to a group whose leader answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.replies: list[asyncio.Future[None]] = []

    async def request(self, subject: str, message: Any, reply_type: type, *, timeout: float) -> DispatchReply:
        names = [bytes(raw).decode() for raw in message.requests]
        self.asked.append(names)
        self.replies.append(asyncio.get_running_loop().create_future())
        await self.replies[-1]
        return DispatchReply("g", 1, names, [], FREE)


class _Outcome:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self.answers = asyncio.Queue[None]()

    def accepted(self, item: WaitingRequest, group: str, epoch: int) -> None:
        self.taken.append(item.generation_id)

    def rejected(self, item: WaitingRequest, refusal: Refusal) -> None:
        raise AssertionError(refusal)

    def returned(self, item: WaitingRequest) -> None:
        raise AssertionError("it was accepted")

    def wake(self) -> None:
        self.answers.put_nowait(None)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_comes_while_a_group_answers_goes_in_the_next_batch() -> None:
    table, leader, outcome = table_of(group("g")), _Leader(), _Outcome()
    metrics = SchedulerMetrics(CollectorRegistry(), table.breakers)
    dispatcher = Dispatcher(cast(Any, leader), table, Batcher(WAIT, 1000), outcome, metrics, timeout=1.0)
    for name in "abcd":
        item = waiting(name, raw=name.encode())
        table.reserve(known(table, "g"), item.tokens)
        dispatcher.add(known(table, "g"), item)
        dispatcher.flush(more_coming=False)
        await _turns()
    assert leader.asked == [["a"]]
    leader.replies[0].set_result(None)
    await outcome.answers.get()
    dispatcher.flush(more_coming=False)
    await _turns()
    assert leader.asked == [["a"], ["b", "c", "d"]]
    leader.replies[1].set_result(None)
    await dispatcher.finish()
    assert outcome.taken == ["a", "b", "c", "d"]
    assert known(table, "g").sent_requests == 0


class _Acked(Settled):
    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.Event()

    async def ack(self) -> None:
        await super().ack()
        self.done.set()


async def test_what_rings_have_taken_is_acknowledged_soon_and_before_the_scheduler_goes() -> None:
    metrics = SchedulerMetrics(CollectorRegistry(), table_of().breakers)
    rejections = Rejections(cast(Any, None), metrics)
    running = asyncio.create_task(rejections.run())
    items = [waiting(name) for name in "abc"]
    deliveries = [_Acked() for _ in items]
    for item, delivery in zip(items, deliveries, strict=True):
        item.delivery = delivery
    rejections.settle(items[0])
    rejections.settle(items[1])
    assert [delivery.count for delivery in deliveries] == [0, 0, 0]
    await deliveries[1].done.wait()
    assert [delivery.count for delivery in deliveries] == [1, 1, 0]
    rejections.settle(items[2])
    await rejections.drained()
    assert [delivery.count for delivery in deliveries] == [1, 1, 1]
    running.cancel()
