"""The batcher waits only while it is worth it, loses nothing, and keeps the order."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.dispatcher import MAX_BATCH, Batcher
from tests.unit.scheduler.requests import waiting

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
def test_batches_are_bounded_in_order_and_complete(
    requests: list[tuple[str, int, float]], max_bytes: int
) -> None:
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
