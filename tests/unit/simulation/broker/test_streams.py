"""The model's streams and consumers: what conformance with nats-server does not hold."""

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.simulation.broker.configs import SECOND, ConsumerConfig, StreamConfig
from tests.simulation.broker.consumers import Consumer, Pull
from tests.simulation.broker.disk import Disk, revived
from tests.simulation.broker.streams import Stream
from tests.simulation.broker.subjects import Filter, Sublist, matches, overlaps

TOKENS = st.sampled_from(["a", "b", "c"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=3).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "*"]), max_size=3).flatmap(
    lambda head: st.sampled_from([">"] + (["*", "a"] if not head else []) + ([""] if head else [])).map(
        lambda last: ".".join([*head, last] if last else head)
    )
)


@hypothesis.given(st.lists(PATTERNS, max_size=8), SUBJECTS, st.integers(0, 7))
def test_a_sublist_finds_what_matches_in_the_order_of_its_coming(patterns: list[str], subject: str, gone: int) -> None:
    items = [(number, pattern) for number, pattern in enumerate(patterns)]
    sublist: Sublist[tuple[int, str]] = Sublist()
    for item in items:
        sublist.insert(item[1], item)
        sublist.match(subject)  # what was found before must not be remembered
    if gone < len(items):
        sublist.remove(items[gone][1], items[gone])
        del items[gone]
    assert sublist.match(subject) == [item for item in items if matches(item[1], subject)]


@hypothesis.given(PATTERNS, PATTERNS, SUBJECTS)
def test_patterns_that_share_a_subject_overlap(one: str, other: str, subject: str) -> None:
    if matches(one, subject) and matches(other, subject):
        assert overlaps(one, other)
        assert overlaps(other, one)
    if matches(one, other):
        assert overlaps(one, other)


@pytest.mark.parametrize(("interval", "left"), [(10.0, [1, 2]), (0.0, [1, 2, 3, 4])])
def test_a_loss_of_power_takes_what_was_not_synced(interval: float, left: list[int]) -> None:
    stream, disk = Stream(StreamConfig(name="S").normal(), 0), Disk(sync_interval=interval)
    disk.add(stream)
    for second in (1, 9, 11, 12):
        stream.publish("S", b"", b"", second * SECOND)
    assert list(revived(stream, 0.0, None).messages) == [1, 2, 3, 4], "a kill takes nothing"
    disk.lose_power(13 * SECOND)
    assert [list(one.messages) for one in disk.load(0.0)] == [left]
    assert [list(one.messages) for one in disk.load(0.0)] == [left], "and it is lost once"


# --- consumers ---------------------------------------------------------------------------------------


WORK = st.one_of(
    st.tuples(st.just("publish"), TOKENS),
    st.tuples(st.just("pull"), st.integers(1, 4)),
    st.tuples(st.just("ack"), st.integers(0, 9)),
    st.tuples(st.just("nak"), st.integers(0, 9)),
    st.tuples(st.just("touch"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(1, 4)),
    st.tuples(st.just("delete"), st.integers(1, 12)),
    st.tuples(st.just("restart"), st.just(0)),
)


class Worked:
    """A consumer that is worked with, step by step."""

    def __init__(self, most: int, wanted: str) -> None:
        self.most, self.taken = most, Filter([wanted])
        self.stream = Stream(StreamConfig(name="S", subjects=[">"]).normal(), 0)
        config = ConsumerConfig(
            durable_name="c", ack_policy="explicit", ack_wait=3 * SECOND, max_ack_pending=most, filter_subject=wanted
        )
        self.consumer = Consumer(config.normal("c"), self.stream, 0, 0.0)
        self.stream.watchers["c"] = self.consumer
        self.now = 0.0
        self.done: set[int] = set()
        self.given: list[int] = []

    def publish(self, subject: str) -> None:
        self.stream.publish(subject, b"", b"", 1)

    def pull(self, batch: int) -> None:
        self.consumer.request(Pull("r", left=batch, expires=self.now + 2), self.now)

    def ack(self, at: int) -> None:
        if at < len(self.given):
            self.done.update(self.consumer.acknowledge(self.given[at], 1))

    def nak(self, at: int) -> None:
        if at < len(self.given):
            self.consumer.refuse(self.given[at], self.now, 0.0)

    def touch(self, at: int) -> None:
        if at < len(self.given):
            self.consumer.touch(self.given[at], self.now)

    def wait(self, seconds: int) -> None:
        self.now += seconds

    def delete(self, number: int) -> None:
        self.stream.remove(number)

    def restart(self, _: int) -> None:
        self.stream = revived(self.stream, self.now, None)
        found = self.stream.watchers["c"]
        assert isinstance(found, Consumer)
        self.consumer = found

    def deliver(self) -> None:
        for delivery in self.consumer.work(self.now, 1, lambda subject: True):
            if delivery.message is not None:
                assert delivery.message.sequence not in self.done, "it was acknowledged"
                assert self.taken.takes(delivery.message.subject)
                self.given.append(delivery.message.sequence)

    def check(self) -> None:
        consumer = self.consumer
        assert consumer.left == self.stream.pending(consumer.next, self.taken)
        assert set(consumer.pending) <= set(self.stream.messages)
        assert self.most < 0 or len(consumer.pending) <= self.most
        assert consumer.floor[0] <= consumer.delivered
        assert all(number > consumer.floor[1] for number in consumer.pending)
        assert all(pull.left > 0 for pull in consumer.waiting)


@hypothesis.given(st.lists(WORK, max_size=40), st.sampled_from([-1, 2]), st.sampled_from(["a", ">"]))
def test_everything_is_delivered_until_it_is_acknowledged_and_not_again(
    steps: list[tuple[str, object]], most: int, wanted: str
) -> None:
    worked = Worked(most, wanted)
    for name, value in steps:
        getattr(worked, name)(value)
        worked.deliver()
        worked.check()
    for _ in range(3 * len(steps) + 3):  # whoever goes on pulling and acknowledging comes to an end
        worked.pull(10)
        worked.given.clear()
        worked.deliver()
        for at in range(len(worked.given)):
            worked.ack(at)
        worked.wait(3)
    assert set(worked.stream.numbers(worked.taken)) <= worked.done
    assert (worked.consumer.left, len(worked.consumer.pending)) == (0, 0)
