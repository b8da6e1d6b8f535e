"""A connection that its process has closed, and that does not come back, is a process that is gone."""

from datetime import UTC, datetime

import pytest

from services.health_monitor.detector import GRACE, NOTICE, STALL, ConnectedClient, ConnectionEvent, Detector
from shared.messages import GroupBeat, GroupEvent, GroupLoad, GroupStatus, Heartbeat, RankBeat
from shared.nats import subjects

SERVICE = subjects.connection("executor", "executor-1")
LEADER = subjects.leader_connection("executor-1", "g")
SOON, DUE = GRACE / 2, GRACE + 0.01


def beat(epoch: int = 1, state: str = "ready", *, connected: bool = True) -> Heartbeat:
    ranks = [RankBeat(0, 11, 1, 1, False)]
    said = GroupBeat("g", "m", epoch, state, ranks, GroupLoad(total_blocks=9, free_blocks=9), connected=connected)  # type: ignore[arg-type]
    return Heartbeat("executor", "executor-1", 10, "ready", "", said)


def event(name: str, reason: str = "Client Closed", start: int = 0) -> ConnectionEvent:
    return ConnectionEvent(ConnectedClient(datetime(2026, 1, 1, 0, 0, start, tzinfo=UTC), name), reason)


def state(seen: Detector) -> GroupStatus:
    (record,) = seen.groups()
    return record.state


def kinds(events: list[GroupEvent]) -> list[tuple[int, str]]:
    return [(event.epoch, event.kind) for event in events]


@pytest.fixture
def seen() -> Detector:
    """With one group, heard at 0 and never again."""
    detector = Detector(hung_after=2.5, gone_after=100.0, forget_after=60.0)
    detector.observe(beat(), 0.0)
    detector.tick(0.0)
    return detector


@pytest.mark.parametrize(("name", "expected"), [(SERVICE, "gone"), (LEADER, "hung")])
@pytest.mark.parametrize("reason", ["Client Closed", "Read Error", "Write Error"])
def test_a_process_that_is_killed_is_known_long_before_its_silence(
    seen: Detector, name: str, expected: str, reason: str
) -> None:
    """A ring whose executor lives is one that comes back: the scheduler loads no other in its place."""
    seen.closed(event(name, reason), 0.1)
    assert seen.tick(0.1 + SOON) == []
    lost = seen.tick(0.1 + DUE)
    assert kinds(lost) == [(1, "down")]
    assert "connection to NATS" in lost[0].reason
    assert state(seen) == expected
    assert seen.tick(0.9) == [], "told once"
    seen.closed(event(SERVICE, reason), 1.0)
    seen.tick(1.0 + DUE)
    assert state(seen) == "gone"


def test_the_leader_of_another_group_of_the_same_host_may_leave(seen: Detector) -> None:
    seen.closed(event(subjects.leader_connection("executor-1", "unloaded")), 0.1)
    assert seen.tick(0.1 + DUE) == []
    assert state(seen) == "ready"


@pytest.mark.parametrize("name", [SERVICE, LEADER])
def test_a_connection_that_is_renewed_is_no_loss(seen: Detector, name: str) -> None:
    seen.closed(event(name), 0.1)
    seen.opened(event(name, start=1))
    assert seen.tick(0.1 + DUE) == []
    assert state(seen) == "ready"


def test_the_end_of_an_older_connection_says_nothing_of_the_newer_one(seen: Detector) -> None:
    seen.opened(event(SERVICE, start=5))
    seen.closed(event(SERVICE, start=4), 0.1)
    assert seen.tick(0.1 + DUE) == []
    seen.closed(event(SERVICE, start=5), 0.6)
    assert kinds(seen.tick(0.6 + DUE)) == [(1, "down")]


def test_a_service_that_is_heard_after_all_is_alive(seen: Detector) -> None:
    seen.closed(event(SERVICE), 0.1)
    assert seen.observe(beat(), 0.2) == []
    assert seen.tick(0.1 + DUE) == []
    assert state(seen) == "ready"


@pytest.mark.parametrize(
    "reason", ["Slow Consumer (Pending Bytes)", "Stale Connection", "Server Shutdown", "Kicked", ""]
)
def test_what_the_broker_cuts_may_live(seen: Detector, reason: str) -> None:
    seen.closed(event(SERVICE, reason), 0.1)
    seen.closed(event(LEADER, reason), 0.1)
    assert seen.tick(0.1 + DUE) == []
    assert state(seen) == "ready"


def test_a_ring_whose_leader_is_cut_off_does_not_serve_whatever_its_orchestrator_says(seen: Detector) -> None:
    seen.closed(event(LEADER), 0.1)
    assert kinds(seen.tick(0.1 + DUE)) == [(1, "down")]
    assert seen.observe(beat(), 0.8) == []
    assert state(seen) == "hung"
    seen.opened(event(LEADER, start=1))
    assert kinds(seen.observe(beat(), 1.2)) == [(1, "up")]


def test_a_leader_that_reconnected_unheard_serves_once_it_says_so(seen: Detector) -> None:
    """This monitor was not connected itself when the leader's new connection was opened."""
    seen.closed(event(LEADER), 0.1)
    cut = 0.1 + DUE
    seen.tick(cut)
    assert seen.observe(beat(), cut + NOTICE / 2) == []
    assert state(seen) == "hung", "the heartbeat may be older than the loss"
    assert seen.observe(beat(connected=False), cut + NOTICE) == []
    assert state(seen) == "hung"
    assert kinds(seen.observe(beat(), cut + NOTICE + 0.5)) == [(1, "up")]
    assert kinds(seen.observe(beat(connected=False), cut + NOTICE + 1.0)) == [(1, "down")]


def test_the_next_ring_is_not_held_to_account(seen: Detector) -> None:
    seen.closed(event(LEADER), 0.1)
    seen.tick(0.1 + DUE)
    assert kinds(seen.observe(beat(epoch=2), 0.9)) == [(2, "up")]


def test_other_connections_and_those_who_said_goodbye_change_nothing(seen: Detector) -> None:
    seen.observe(Heartbeat("executor", "executor-1", 10, "gone"), 0.05)
    for name in ("", "test", "ryzanstein status", "executor/other", SERVICE, LEADER):
        seen.closed(event(name), 0.1)
    assert seen.tick(0.1 + DUE) == []


def test_services_without_a_group_go_too(seen: Detector) -> None:
    seen.observe(Heartbeat("gateway", "gateway-1", 7, "ready"), 0.0)
    seen.closed(event("gateway/gateway-1"), 0.1)
    seen.tick(0.1 + DUE)
    assert {one.instance: one.state for one in seen.services()} == {"executor-1": "ready", "gateway-1": "gone"}


def test_a_monitor_that_was_asleep_gives_time_to_come_back(seen: Detector) -> None:
    seen.closed(event(SERVICE), 0.1)
    later = 0.2 + STALL
    assert seen.tick(later) == []
    assert seen.tick(later + SOON) == []
    assert kinds(seen.tick(later + DUE)) == [(1, "down")]


def test_a_closed_connection_is_due_unless_it_is_back(seen: Detector) -> None:
    seen.closed(event(SERVICE), 0.1)
    assert seen.due() == 0.1 + GRACE
    seen.opened(event(SERVICE, start=1))
    assert seen.due() == 100.0
