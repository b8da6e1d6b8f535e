"""Two monitors that hear more or less of the same: what they write converges on the truth."""

from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.health_monitor.detector import Detector
from shared.messages import GroupBeat, GroupLoad, GroupRecord, GroupStatus, Heartbeat, RankBeat, ServiceRecord

GONE = 4.0
UNIX = 1_000_000.0
WORK = GroupLoad(running=1, free_blocks=3, total_blocks=4)


def beat(progress: int, epoch: int = 1) -> Heartbeat:
    said = GroupBeat("g", "m", epoch, "ready", [RankBeat(0, 11, 1, progress, True)], WORK)
    return Heartbeat("executor", "executor-1", 10, "ready", "", said)


def detector() -> Detector:
    return Detector(hung_after=2.5, gone_after=GONE, forget_after=60.0)


@dataclass
class Monitor:
    """A detector with a clock of its own (each counts from its own start)."""

    offset: float
    seen: Detector = field(default_factory=detector)

    def hear(self, heard: Heartbeat, now: float) -> None:
        self.seen.observe(heard, now + self.offset, UNIX + now)

    def tick(self, now: float) -> None:
        self.seen.tick(now + self.offset)

    def read(self, record: GroupRecord, now: float) -> None:
        self.seen.merge(record, now + self.offset, UNIX + now)

    @property
    def record(self) -> GroupRecord:
        (record,) = self.seen.groups()
        return record

    @property
    def state(self) -> GroupStatus:
        return self.record.state


def test_who_hears_knows_more_than_who_does_not() -> None:
    hearing, deaf = Monitor(0.0), Monitor(500.0)
    deaf.hear(beat(0), 0.0)
    for tenth in range(200):
        now = tenth / 10
        if tenth % 10 == 0:
            hearing.hear(beat(tenth), now)
        hearing.tick(now)
        deaf.tick(now)
        if tenth % 20 == 0:  # an unchanged record is confirmed so often
            deaf.read(hearing.record, now)
        assert (hearing.state, deaf.state) == ("ready", "ready")


def test_two_that_read_each_other_do_not_keep_the_dead_alive() -> None:
    one, other = Monitor(0.0), Monitor(77.0)
    for monitor in (one, other):
        monitor.hear(beat(0), 0.0)
    for tenth in range(1, 42):
        now = tenth / 10
        for monitor, peer in ((one, other), (other, one)):
            monitor.tick(now)
            monitor.read(peer.record, now)
    assert (one.state, other.state) == ("gone", "gone")


def test_one_that_was_started_anew_does_not_delay_the_verdict() -> None:
    """It gives everybody time, but that is no news of them."""
    old, new = Monitor(0.0), Monitor(9.0)
    old.hear(beat(0), 0.0)
    old.tick(3.5)
    new.seen.restore([], [old.record], 3.5 + new.offset)
    old.read(new.record, 3.6)
    for tenth in range(36, 41):
        old.tick(tenth / 10)
    assert old.state == "gone"
    new.read(old.record, 4.1)
    assert new.state == "gone"


def test_a_verdict_on_the_same_evidence_is_taken_over_until_the_next_beat() -> None:
    one, other = Monitor(0.0), Monitor(0.0)
    for second in range(4):
        one.hear(beat(7), float(second))
    other.hear(beat(7), 3.1)
    assert (one.state, other.state) == ("hung", "ready")
    other.read(one.record, 3.2)
    one.read(msgspec.structs.replace(other.record, state="ready"), 3.2)
    assert (one.state, other.state) == ("hung", "hung")
    other.hear(beat(8), 4.1)
    one.read(other.record, 4.2)
    assert (one.state, other.state) == ("ready", "ready")


def test_a_later_life_and_an_unknown_group_are_taken_over() -> None:
    one, other = Monitor(0.0), Monitor(3.0)
    one.hear(beat(0), 0.0)
    other.read(one.record, 0.1)
    assert other.state == "ready"
    one.hear(beat(0, epoch=2), 0.2)
    other.read(one.record, 0.3)
    assert other.record.epoch == 2
    other.read(msgspec.structs.replace(one.record, epoch=1, state="gone"), 0.4)
    assert (other.record.epoch, other.state) == (2, "ready")


def test_records_without_evidence_come_from_an_older_version_and_do_not_count() -> None:
    one = Monitor(0.0)
    one.hear(beat(0), 0.0)
    one.read(msgspec.structs.replace(one.record, state="gone", heard_at=0.0), 0.1)
    assert one.state == "ready"


def service(seen: Detector) -> ServiceRecord:
    (record,) = seen.services()
    return record


def test_services_are_agreed_on_alike() -> None:
    old, new = Monitor(0.0), Monitor(50.0)
    hello = Heartbeat("gateway", "gateway-1", 7, "ready")
    old.hear(hello, 0.0)
    new.seen.restore([service(old.seen)], [], 3.9 + new.offset)
    for tenth in range(41):
        old.tick(tenth / 10)
    assert (service(old.seen).state, service(new.seen).state) == ("gone", "ready")
    new.seen.merge_service(service(old.seen), 4.1 + new.offset, UNIX + 4.1)
    assert service(new.seen).state == "gone", "it has not heard it later"
    new.hear(hello, 5.0)
    new.seen.merge_service(service(old.seen), 5.1 + new.offset, UNIX + 5.1)
    assert service(new.seen).state == "ready"
    old.seen.merge_service(service(new.seen), 5.1, UNIX + 5.1)
    assert service(old.seen).state == "ready"


def test_what_another_has_taken_off_the_list_goes_unless_it_is_heard() -> None:
    one = Monitor(0.0)
    one.hear(beat(0), 0.0)
    one.seen.drop("g", "executor-1")
    assert one.state == "ready"
    assert service(one.seen).state == "ready"
    for tenth in range(41):
        one.tick(tenth / 10)
    one.seen.drop("g", "executor-1")
    assert (one.seen.groups(), one.seen.services()) == ([], [])


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=60, max_size=120))
def test_once_both_hear_they_agree(happens: list[tuple[bool, bool, bool]]) -> None:
    """Whatever each of them misses, and in whatever order they read each other: two seconds after both hear
    again, both say that the group lives; and a silent group is gone for both."""
    pair = Monitor(0.0), Monitor(123.0)
    for monitor in pair:
        monitor.hear(beat(0), 0.0)
    now = 0.0
    for tenth, (first, second, reads) in enumerate(happens, 1):
        now = tenth / 10
        for monitor, hears, peer in ((pair[0], first, pair[1]), (pair[1], second, pair[0])):
            monitor.tick(now)
            if hears and tenth % 10 == 0:
                monitor.hear(beat(tenth), now)
            if reads:
                monitor.read(peer.record, now)
    settle(pair, now, range(1, 21), beats=True)
    assert (pair[0].state, pair[1].state) == ("ready", "ready")
    settle(pair, now, range(21, 70), beats=False)
    assert (pair[0].state, pair[1].state) == ("gone", "gone")


def settle(pair: tuple[Monitor, Monitor], start: float, tenths: range, *, beats: bool) -> None:
    """Both read each other, and hear the same."""
    for tenth in tenths:
        now = start + tenth / 10
        for monitor, peer in (pair, pair[::-1]):
            monitor.tick(now)
            if beats and tenth % 10 == 0:
                monitor.hear(beat(1000 + tenth), now)
            monitor.read(peer.record, now)
