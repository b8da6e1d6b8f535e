"""A group that is gone: it has left, or it was lost."""

import msgspec
import pytest

from services.health_monitor.detector import Detector
from shared.messages import GroupBeat, GroupLoad, GroupStatus, Heartbeat, RingDeath, ServiceStatus
from tests.unit.health_monitor.test_detector import GONE, beat, detector, rank


def lost(seen: Detector) -> bool:
    return seen.lost() == {"g"}


def without_ring(service: ServiceStatus) -> Heartbeat:
    said = GroupBeat("g", "m", 1, "starting", [], GroupLoad())
    return Heartbeat("executor", "executor-1", 1, service, "", said)


def test_one_that_falls_silent_is_lost_until_it_is_heard() -> None:
    seen = detector()
    seen.observe(beat(rank(in_flight=False)), 0.0)
    assert not lost(seen)
    seen.tick(GONE - 0.1)
    assert not lost(seen)
    seen.tick(GONE)
    assert lost(seen)
    seen.tick(GONE + 1)
    assert lost(seen)
    seen.observe(beat(rank(in_flight=False), epoch=2), GONE + 2)
    assert not lost(seen)


@pytest.mark.parametrize("before", ["draining", "starting"])
def test_one_that_was_not_in_service_any_more_has_left(before: str) -> None:
    seen = detector()
    seen.observe(beat(rank(in_flight=False)), 0.0)
    seen.observe(beat(rank(in_flight=False), state=before), 0.5)
    seen.observe(beat(rank(in_flight=False), state=before, service="gone"), 1.0)
    assert seen.groups()[0].state == "gone"
    assert not lost(seen)


def test_an_executor_that_says_goodbye_after_its_ring_has_gone_has_left() -> None:
    seen = detector()
    seen.observe(beat(rank(in_flight=False)), 0.0)
    seen.observe(without_ring("draining"), 1.0)
    seen.observe(without_ring("gone"), 1.1)
    assert not lost(seen)


@pytest.mark.parametrize(("state", "is_lost"), [("ready", True), ("hung", True), ("draining", False)])
def test_what_another_monitor_writes_counts_alike(state: GroupStatus, is_lost: bool) -> None:
    writer, reader = detector(), detector()
    writer.observe(beat(rank(in_flight=False)), 0.0, 100.0)
    (record,) = writer.groups()
    reader.merge(msgspec.structs.replace(record, state=state), 0.0, 100.0)
    reader.merge(msgspec.structs.replace(record, state="gone"), 0.1, 100.1)
    assert lost(reader) is is_lost


def test_what_an_executor_says_of_its_rings_end_is_passed_on() -> None:
    seen = detector()
    seen.observe(beat(rank(in_flight=False)), 0.0)
    death = RingDeath(1, "crashed", ["a", "b"])
    said = GroupBeat("g", "m", 1, "starting", [], GroupLoad(), message="it ended", death=death)
    (event,) = seen.observe(Heartbeat("executor", "executor-1", 1, "ready", "", said), 0.5)
    assert (event.kind, event.reason, event.death) == ("down", "it ended", death)


@pytest.mark.parametrize("epoch", [1, 0])
def test_a_later_ring_tells_of_the_end_of_the_one_before_it(epoch: int) -> None:
    seen = detector()
    seen.observe(beat(rank(in_flight=False)), 0.0)
    death = RingDeath(epoch, "hung", ["a"])
    later = beat(rank(in_flight=False), epoch=2)
    assert later.group is not None
    said = msgspec.structs.replace(later, group=msgspec.structs.replace(later.group, death=death))
    down, up = seen.observe(said, 0.5)
    assert (down.kind, down.epoch, down.death) == ("down", 1, death if epoch == 1 else None)
    assert (up.kind, up.death) == ("up", None)
