"""The failure detector: progress decides between busy and hung, silence between alive and gone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.health_monitor.detector import STALL, Detector
from services.health_monitor.service import HealthMonitorSettings
from shared.messages import (
    GroupBeat,
    GroupEvent,
    GroupLoad,
    GroupRecord,
    GroupStatus,
    GroupWork,
    Heartbeat,
    RankBeat,
    ServiceRecord,
)

HUNG, GONE, FORGET = 5.0, 5.0, 60.0
IDLE = GroupLoad(free_blocks=10, total_blocks=10)
WORK = GroupLoad(running=3, free_blocks=5, total_blocks=10)


def detector() -> Detector:
    return Detector(hung_after=HUNG, gone_after=GONE, forget_after=FORGET)


def rank(number: int = 0, *, step: int = 0, progress: int = 0, in_flight: bool = True) -> RankBeat:
    return RankBeat(number, 100 + number, step, progress, in_flight)


def beat(
    *ranks: RankBeat,
    epoch: int = 1,
    state: str = "ready",
    load: GroupLoad = IDLE,
    service: str = "ready",
    instance: str = "executor-1",
) -> Heartbeat:
    said = GroupBeat("g", "m", epoch, state, list(ranks), load)  # type: ignore[arg-type]
    return Heartbeat("executor", instance, 1, service, "", said)  # type: ignore[arg-type]


def state(seen: Detector) -> GroupStatus:
    (record,) = seen.groups()
    return record.state


def kinds(events: list[GroupEvent]) -> list[tuple[int, str]]:
    return [(event.epoch, event.kind) for event in events]


def test_a_group_comes_up_once() -> None:
    seen = detector()
    assert seen.observe(beat(state="starting"), 0.0) == []
    assert state(seen) == "starting"
    assert kinds(seen.observe(beat(rank(in_flight=False)), 1.0)) == [(1, "up")]
    assert seen.observe(beat(rank(in_flight=False)), 2.0) == []
    assert state(seen) == "ready"


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (IDLE, "ready"),
        (WORK, "ready"),
        (GroupLoad(running=1, waiting=1, free_blocks=5, total_blocks=10), "busy"),
        (GroupLoad(running=4, free_blocks=0, total_blocks=10), "busy"),
    ],
)
def test_busy_is_a_full_group_or_one_with_a_queue(load: GroupLoad, expected: GroupStatus) -> None:
    seen = detector()
    seen.observe(beat(rank(), load=load), 0.0)
    assert state(seen) == expected


def test_a_rank_that_stands_still_with_a_step_in_flight_is_hung_and_may_recover() -> None:
    seen = detector()
    for second in range(5):
        events = seen.observe(beat(rank(0, progress=second), rank(1, progress=7), load=WORK), float(second))
    assert state(seen) == "ready"
    events = seen.observe(beat(rank(0, progress=5), rank(1, progress=7), load=WORK), 5.0)
    assert kinds(events) == [(1, "down")]
    assert "rank 1" in events[0].reason
    assert state(seen) == "hung"
    assert seen.observe(beat(rank(0, progress=5), rank(1, progress=7), load=WORK), 6.0) == []
    assert kinds(seen.observe(beat(rank(0, progress=6), rank(1, progress=8), load=WORK), 7.0)) == [(1, "up")]


@pytest.mark.parametrize(("in_flight", "load"), [(False, WORK), (True, IDLE)])
def test_without_a_step_in_flight_or_work_nothing_need_move(in_flight: bool, load: GroupLoad) -> None:
    seen = detector()
    for second in range(30):
        seen.observe(beat(rank(in_flight=in_flight), load=load), float(second))
    assert state(seen) == "ready"
    seen.observe(beat(rank(in_flight=True), load=WORK), 30.0)
    seen.observe(beat(rank(in_flight=True), load=WORK), 34.9)
    assert state(seen) == "ready", "only from now on it stands still"


def test_silence_is_gone_and_a_new_beat_brings_it_back() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    seen.tick(0.0)
    for tenth in range(1, 50):
        assert seen.tick(tenth / 10) == []
    events = seen.tick(5.0)
    assert kinds(events) == [(1, "down")]
    assert state(seen) == "gone"
    assert seen.services()[0].state == "gone"
    assert seen.tick(5.1) == []
    assert kinds(seen.observe(beat(rank()), 5.2)) == [(1, "up")]


def test_an_instance_that_says_it_is_gone_takes_its_group_along() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    assert kinds(seen.observe(beat(rank(), service="gone"), 1.0)) == [(1, "down")]
    assert state(seen) == "gone"
    assert seen.observe(beat(rank(), service="gone"), 1.1) == []


def test_draining_is_told_once_and_then_its_end() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    assert kinds(seen.observe(beat(rank(), state="draining"), 1.0)) == [(1, "draining")]
    assert seen.observe(beat(rank(), service="draining"), 2.0) == []
    assert state(seen) == "draining"
    assert kinds(seen.observe(beat(rank(), service="gone"), 3.0)) == [(1, "down")]


def test_a_ring_that_went_down_is_told_at_once() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    events = seen.observe(beat(state="starting"), 0.1)
    assert kinds(events) == [(1, "down")]
    assert state(seen) == "starting"
    assert kinds(seen.observe(beat(rank(), epoch=2), 9.0)) == [(2, "up")]


def test_a_new_epoch_is_another_ring() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    events = seen.observe(beat(rank(), epoch=2), 1.0)
    assert kinds(events) == [(1, "down"), (2, "up")]
    assert seen.observe(beat(rank(), epoch=1), 1.5) == [], "the dead are not heard"
    assert seen.groups()[0].epoch == 2


def ringless(epoch: int, instance: str = "executor-1", message: str = "rank 1 died") -> Heartbeat:
    said = GroupBeat("g", "m", epoch, "starting", [], GroupLoad(), message=message)
    return Heartbeat("executor", instance, 1, "ready", "", said)


@pytest.mark.parametrize("epoch", [7, 0], ids=["the last ring's epoch", "no epoch"])
def test_an_executor_without_a_ring_is_starting_at_once_and_stays_known(epoch: int) -> None:
    seen = detector()
    seen.observe(beat(rank(), epoch=7), 0.0)
    events = seen.observe(ringless(epoch), 0.5)
    assert [(e.epoch, e.kind, e.reason) for e in events] == [(7, "down", "rank 1 died")]
    for second in range(1, 30):
        assert seen.observe(ringless(epoch), float(second)) == []
        assert seen.tick(float(second)) == []
        (record,) = seen.groups()
        assert (record.state, record.epoch, record.message) == ("starting", 7, "rank 1 died")
        assert (record.ranks, record.load) == ([], GroupLoad())
    assert kinds(seen.observe(beat(rank(), epoch=8), 30.0)) == [(8, "up")]


def test_an_executor_that_was_replaced_cannot_take_its_group_down() -> None:
    seen = detector()
    seen.observe(beat(rank(), epoch=7), 0.0)
    assert seen.observe(ringless(6, "executor-0"), 0.1) == []
    assert state(seen) == "ready"
    assert kinds(seen.tick(5.0)) == [(7, "down")]
    assert seen.observe(ringless(0, "executor-0"), 5.1) == [], "nobody has the group any more"
    assert state(seen) == "starting"


@given(st.floats(0.0, 1.0), st.lists(st.floats(-0.2, 0.2), min_size=12, max_size=12))
def test_a_rank_that_stops_is_known_within_five_seconds(phase: float, jitter: list[float]) -> None:
    """With the default settings, a heartbeat each second that travels more or less fast."""
    settings = HealthMonitorSettings()
    seen = Detector(hung_after=settings.hung_after, gone_after=settings.gone_after, forget_after=60.0)
    stop = 2.0 + phase
    known = None
    for second, late in enumerate(jitter):
        progress = min(float(second), stop)
        heard = second + 0.2 + late
        seen.observe(beat(rank(progress=int(progress * 1000)), load=WORK), heard)
        if known is None and state(seen) == "hung":
            known = heard
    assert known is not None
    assert stop < known <= stop + 5.0


def test_the_gone_are_forgotten_after_a_while() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    seen.observe(beat(rank(), service="gone"), 0.0)
    now = 0.0
    while now < GONE + FORGET:
        seen.tick(now)
        assert len(seen.groups()) == len(seen.services()) == 1
        now += 0.5
    seen.tick(GONE + FORGET)
    assert seen.groups() == []
    assert seen.services() == []


def test_a_restarted_monitor_gives_everybody_time_and_does_not_repeat_itself() -> None:
    records = [
        GroupRecord("up", "m", "ready", 1, [], IDLE, "executor-1"),
        GroupRecord("lost", "m", "busy", 4, [], IDLE, "executor-2"),
        GroupRecord("hung", "m", "hung", 2, [], IDLE, "executor-3"),
    ]
    seen = detector()
    seen.restore([ServiceRecord("executor", "executor-1", 1, "ready")], records, 100.0)
    assert seen.tick(104.9) == []
    up = GroupBeat("up", "m", 1, "ready", [rank()], IDLE)
    assert seen.observe(Heartbeat("executor", "executor-1", 1, "ready", "", up), 104.9) == []
    assert kinds(seen.tick(105.0)) == [(4, "down")]
    assert {record.group: record.state for record in seen.groups()} == {"up": "ready", "lost": "gone", "hung": "gone"}


def test_a_monitor_that_was_asleep_blames_nobody() -> None:
    seen = detector()
    seen.observe(beat(rank()), 0.0)
    seen.tick(0.1)
    assert seen.tick(60.0) == []
    assert state(seen) == "ready"
    now = 60.0
    while now < 64.9:
        assert seen.tick(now) == []
        now += STALL / 2
    assert kinds(seen.tick(65.0)) == [(1, "down")]


def test_a_service_without_a_group_is_only_listed() -> None:
    seen = detector()
    assert seen.observe(Heartbeat("gateway", "gateway-1", 7, "ready", "127.0.0.1:1"), 0.0) == []
    assert seen.services() == [ServiceRecord("gateway", "gateway-1", 7, "ready", "127.0.0.1:1")]
    assert seen.groups() == []


gaps = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=40)


@given(gaps, st.integers(1, 4))
def test_never_hung_while_progress_moves(schedule: list[float], ranks: int) -> None:
    """However late and lossy the beats are."""
    seen, now = detector(), 0.0
    for count, gap in enumerate(schedule):
        now += gap
        seen.tick(now)
        seen.observe(beat(*(rank(n, progress=count) for n in range(ranks)), load=WORK), now)
        assert state(seen) == "ready"


@given(
    st.lists(st.floats(0.05, 1.5), min_size=1, max_size=60), st.integers(0, 30), st.integers(1, 4), st.integers(0, 3)
)
def test_always_hung_within_the_bound(gaps: list[float], stops: int, ranks: int, still: int) -> None:
    """One rank stops at beat `stops`; it is hung at the first beat that shows it still for long enough,
    and not before."""
    seen, now, since = detector(), 0.0, 0.0
    for count, gap in enumerate(gaps):
        now += gap
        if count <= stops:
            since = now
        beats = [rank(n, progress=min(count, stops) if n == still % ranks else count) for n in range(ranks)]
        seen.observe(beat(*beats, load=WORK), now)
        assert (state(seen) == "hung") == (now - since >= HUNG)


@given(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=80), st.floats(0, 30.0))
def test_gone_exactly_when_silent_for_long_enough(ticks: list[float], silent_from: float) -> None:
    seen, now, heard = detector(), 0.0, 0.0
    seen.observe(beat(rank(in_flight=False)), 0.0)
    seen.tick(0.0)
    for gap in ticks:
        now += gap
        if now <= silent_from:
            seen.observe(beat(rank(in_flight=False)), now)
            heard = now
        seen.tick(now)
        assert (state(seen) == "gone") == (now - heard >= GONE)


beats = st.builds(
    beat,
    st.builds(rank, step=st.integers(0, 3), progress=st.integers(0, 3), in_flight=st.booleans()),
    epoch=st.integers(1, 4),
    state=st.sampled_from(["starting", "ready", "draining"]),
    load=st.sampled_from([IDLE, WORK]),
    service=st.sampled_from(["starting", "ready", "draining", "gone"]),
)


@given(st.lists(st.tuples(st.floats(0.05, 3.0), st.none() | beats), max_size=60))
def test_events_alternate_and_agree_with_the_states(schedule: list[tuple[float, Heartbeat | None]]) -> None:
    """Whatever is heard: per ring up before down, never twice in a row, epochs never go back."""
    seen, now, up, newest = detector(), 0.0, set[int](), 0
    for gap, heard in schedule:
        now += gap
        events = seen.tick(now) + (seen.observe(heard, now) if heard else [])
        for event in events:
            assert event.epoch >= newest or event.kind == "down"
            newest = max(newest, event.epoch)
            if event.kind == "up":
                up.add(event.epoch)
            elif event.kind == "draining":
                assert event.epoch in up
            else:
                assert event.epoch in up
                up.discard(event.epoch)
        for record in seen.groups():
            if record.state in ("ready", "busy"):
                assert up == {record.epoch}
            elif record.state != "draining":
                assert up == set()


def test_records_carry_what_the_beat_said() -> None:
    seen = detector()
    heard = beat(rank(1, step=4, progress=9), load=WORK)
    assert heard.group is not None
    said = msgspec.structs.replace(heard.group, loaded=0.5, message="loading")
    seen.observe(msgspec.structs.replace(heard, group=said), 0.0)
    (record,) = seen.groups()
    assert record == GroupRecord(
        "g", "m", "ready", 1, [rank(1, step=4, progress=9)], WORK, "executor-1", 0.5, "loading"
    )


def test_a_model_that_loads_for_an_hour_is_starting() -> None:
    seen = detector()
    for second in range(3600):
        assert seen.tick(float(second)) == []
        loading = beat(rank(in_flight=False), state="starting", load=GroupLoad())
        assert seen.observe(loading, float(second)) == []
        assert state(seen) == "starting"


def test_a_prompt_that_takes_a_minute_is_work() -> None:
    """No step ends; a layer is computed every two seconds."""
    seen = detector()
    for second in range(60):
        seen.tick(float(second))
        seen.observe(beat(rank(step=3, progress=second // 2), load=WORK), float(second))
        assert state(seen) == "ready"


def test_old_news_that_a_stopped_monitor_finds_blame_nobody() -> None:
    """Heartbeats of the ten seconds for which it was stopped come in at once, and then the next ones."""
    seen = detector()
    seen.tick(0.0)
    seen.observe(beat(rank(progress=7), load=WORK), 0.0)
    for _ in range(3):
        assert seen.observe(beat(rank(progress=7), load=WORK), 10.0) == []
    assert state(seen) == "ready"
    seen.observe(beat(rank(progress=8), load=WORK), 10.1)
    assert state(seen) == "ready"
    for second in range(11, 16):
        seen.tick(float(second))
        seen.observe(beat(rank(progress=8), load=WORK), second + 0.1)
    assert state(seen) == "hung"


def test_a_slow_group_is_degraded_and_serves() -> None:
    seen = detector()
    work = GroupWork()
    for second in range(60):
        length = 0.01 if second < 30 else 0.05
        steps = round(1 / length)
        work = GroupWork(work.steps + steps, work.seconds + 1.0, work.tokens + 8 * steps)
        heard = beat(rank(step=work.steps, progress=second), load=WORK)
        assert heard.group is not None
        said = msgspec.structs.replace(heard.group, work=work)
        seen.tick(float(second))
        seen.observe(msgspec.structs.replace(heard, group=said), float(second))
        (record,) = seen.groups()
        assert record.state == "ready"
        assert record.weight == 1 or second >= 30
    assert record.weight < 0.5


def test_nothing_is_due_before_somebody_has_been_silent_for_long() -> None:
    seen = detector()
    assert seen.due() == float("inf")
    seen.observe(beat(rank(in_flight=False)), 1.0)
    seen.observe(beat(rank(in_flight=False), instance="executor-2"), 3.0)
    assert seen.due() == 1.0 + GONE  # the service that was heard first, and is still there
    assert seen.tick(seen.due()) == []
    assert [seen.tick(1.0 + GONE + later) for later in (0.5, 1.0, 1.5)] == [[], [], []]
    assert seen.due() == 3.0 + GONE
    assert kinds(seen.tick(3.0 + GONE)) == [(1, "down")]
    assert seen.due() == float("inf")
