"""The model's streams and consumers: what must hold whatever happens to them."""

from dataclasses import dataclass, field

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.simulation.broker.configs import SECOND, ConsumerConfig, Refused, StreamConfig
from tests.simulation.broker.consumers import Consumer, Pull
from tests.simulation.broker.disk import Disk, revived
from tests.simulation.broker.streams import Message, Stream
from tests.simulation.broker.subjects import Filter, Sublist, matches, overlaps

TOKENS = st.sampled_from(["a", "b", "c"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=3).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "*"]), max_size=3).flatmap(
    lambda head: st.sampled_from([">"] + (["*", "a"] if not head else []) + ([""] if head else [])).map(
        lambda last: ".".join([*head, last] if last else head)
    )
)


@hypothesis.given(st.lists(PATTERNS, max_size=8), SUBJECTS, st.integers(0, 7))
def test_a_sublist_finds_what_matches_in_the_order_of_its_coming(
    patterns: list[str], subject: str, gone: int
) -> None:
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


@dataclass
class Naive:
    """A stream as a list."""

    config: StreamConfig
    messages: list[Message] = field(default_factory=list)
    last: int = 0

    def publish(self, subject: str, data: bytes, now: int) -> bool:
        message = Message(self.last + 1, subject, b"", data, now)
        mine = [one for one in self.messages if one.subject == subject]
        most = self.config.max_msgs_per_subject
        kept = [one for one in self.messages if not (0 < most <= len(mine) and one is mine[0])]
        if self.config.discard == "new" and 0 < self.config.max_msgs < len(kept) + 1:
            return False
        self.messages, self.last = [*kept, message], self.last + 1
        if self.config.max_msgs > 0:
            self.messages = self.messages[-self.config.max_msgs :]
        return True

    def expire(self, now: int) -> None:
        self.messages = [one for one in self.messages if one.time > now - self.config.max_age]


CONFIGS = st.builds(
    StreamConfig,
    name=st.just("S"),
    subjects=st.just([">"]),
    max_msgs=st.sampled_from([-1, 3]),
    max_msgs_per_subject=st.sampled_from([-1, 1, 2]),
    discard=st.sampled_from(["old", "new"]),
    max_age=st.just(10 * SECOND),
)
STEPS = st.one_of(
    st.tuples(st.just("publish"), SUBJECTS),
    st.tuples(st.just("remove"), st.integers(1, 12)),
    st.tuples(st.just("purge"), PATTERNS),
    st.tuples(st.just("expire"), st.integers(1, 6)),
)


@hypothesis.given(CONFIGS, st.lists(STEPS, max_size=25), PATTERNS, st.integers(0, 14))
def test_a_stream_is_a_list_of_messages_within_limits(
    config: StreamConfig, steps: list[tuple[str, object]], pattern: str, start: int
) -> None:
    stream, naive, now = Stream(config.normal(), 0), Naive(config), SECOND
    for step in steps:
        match step:
            case ("publish", str(subject)):
                try:
                    stream.publish(subject, b"", b"x", now)
                    assert naive.publish(subject, b"x", now)
                except Refused:
                    assert not naive.publish(subject, b"x", now)
            case ("remove", int(number)):
                there = [one for one in naive.messages if one.sequence == number]
                assert stream.remove(number) == bool(there)
                naive.messages = [one for one in naive.messages if one.sequence != number]
            case ("purge", str(taken)):
                stream.purge(Filter([taken]))
                naive.messages = [one for one in naive.messages if not matches(taken, one.subject)]
            case ("expire", int(seconds)):
                now += seconds * SECOND
                stream.expire(now)
                naive.expire(now)
        assert list(stream.messages.values()) == naive.messages
        assert stream.bytes == sum(one.size for one in naive.messages)
        assert stream.last_sequence == naive.last
    taken = Filter([pattern])
    later = [one for one in naive.messages if one.sequence >= start and taken.takes(one.subject)]
    assert stream.next(start, taken) == (later[0] if later else None)
    assert stream.pending(start, taken) == len(later)
    mine = [one.sequence for one in naive.messages if taken.takes(one.subject)]
    assert list(stream.numbers(taken)) == mine
    assert stream.last_of(pattern) == (mine[-1] if mine else 0)
    if naive.messages:
        assert stream.first_sequence == naive.messages[0].sequence


def headers(**given: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


def test_a_message_with_an_id_is_stored_once_within_the_window() -> None:
    stream = Stream(StreamConfig(name="S", duplicate_window=SECOND).normal(), 0)
    first = headers(Nats_Msg_Id="x")
    assert not stream.publish("S", first, b"", SECOND).duplicate
    assert stream.publish("S", first, b"", SECOND + 1).duplicate
    assert not stream.publish("S", first, b"", 3 * SECOND).duplicate
    assert len(stream.messages) == 2


def test_a_message_goes_when_its_time_is_over() -> None:
    stream = Stream(StreamConfig(name="S", allow_msg_ttl=True).normal(), 0)
    stream.publish("S", headers(Nats_TTL="2"), b"short", SECOND)
    stream.publish("S", b"", b"long", SECOND)
    assert stream.due() == 3 * SECOND
    stream.expire(3 * SECOND)
    assert [message.data for message in stream.messages.values()] == [b"long"]


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
            durable_name="c",
            ack_policy="explicit",
            ack_wait=3 * SECOND,
            max_ack_pending=most,
            filter_subject=wanted,
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


@hypothesis.given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, max_size=6))
def test_a_watcher_is_shown_the_newest_of_each_subject_and_then_what_comes(
    before: list[str], after: list[str]
) -> None:
    stream = Stream(StreamConfig(name="S", subjects=[">"], max_msgs_per_subject=1).normal(), 0)
    for subject in before:
        stream.publish(subject, b"", b"", 1)
    config = ConsumerConfig(deliver_subject="d", deliver_policy="last_per_subject", max_deliver=1).normal("w")
    consumer = Consumer(config, stream, 0, 0.0)
    stream.watchers["w"] = consumer
    shown = len(stream.messages)
    assert consumer.left == shown
    for subject in after:  # some of what it is to be shown is written over meanwhile
        stream.publish(subject, b"", b"", 1)
    assert consumer.work(0.0, 1, lambda subject: False) == []
    seen = [one.message for one in consumer.work(0.0, 1, lambda subject: True) if one.message is not None]
    assert [message.sequence for message in seen] == list(stream.messages)
    assert consumer.left == 0
