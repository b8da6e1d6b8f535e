"""Records are written when they must be, and load no more often than it may."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.health_monitor.registry import CONFIRM_INTERVAL, DueRecords
from shared.messages import GroupLoad, GroupRecord, ServiceRecord

RECORD = GroupRecord("g", "m", "ready", 1, [], GroupLoad())


def written(changes: DueRecords[GroupRecord], record: GroupRecord, now: float) -> bool:
    due = changes.due({"g": record}, now)
    for key, value in due.put.items():
        changes.mark_written(key, value, now)
    return bool(due.put)


def test_a_change_of_state_is_due_at_once_and_load_once_per_interval() -> None:
    changes: DueRecords[GroupRecord] = DueRecords(1.0)
    assert written(changes, RECORD, 0.0)
    assert not written(changes, RECORD, 0.5)
    loaded = msgspec.structs.replace(RECORD, load=GroupLoad(running=1))
    assert not written(changes, loaded, 0.9)
    assert written(changes, loaded, 1.0)
    assert written(changes, msgspec.structs.replace(loaded, state="hung"), 1.01)
    assert written(changes, msgspec.structs.replace(loaded, state="ready", epoch=2), 1.02)


def test_the_end_of_work_is_due_at_once_and_its_begin_is_not() -> None:
    changes: DueRecords[GroupRecord] = DueRecords(1.0)
    works = msgspec.structs.replace(RECORD, load=GroupLoad(running=1))
    assert written(changes, works, 0.0)
    assert written(changes, RECORD, 0.1)
    assert not written(changes, works, 0.2)
    assert not written(changes, RECORD, 0.3)
    assert written(changes, works, 1.1)


def test_an_unchanged_record_is_confirmed_now_and_then() -> None:
    changes: DueRecords[GroupRecord] = DueRecords(1.0)
    changes.restore({"g": msgspec.structs.replace(RECORD, updated_at=77.0)}, 0.0)
    assert not written(changes, RECORD, CONFIRM_INTERVAL - 0.1)
    assert written(changes, RECORD, CONFIRM_INTERVAL)


def test_what_is_no_more_is_deleted_until_that_has_worked() -> None:
    changes: DueRecords[ServiceRecord] = DueRecords(1.0)
    changes.restore({"a": ServiceRecord("gateway", "a", 1, "gone")}, 0.0)
    assert changes.due({}, 1.0).delete == ["a"]
    assert changes.due({}, 2.0).delete == ["a"]
    changes.deleted("a")
    assert changes.due({}, 3.0).delete == []


def test_a_write_that_failed_is_due_again() -> None:
    changes: DueRecords[GroupRecord] = DueRecords(1.0)
    assert changes.due({"g": RECORD}, 0.0).put
    assert changes.due({"g": RECORD}, 0.1).put


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(1, 5)), min_size=1, max_size=50))
def test_load_is_never_older_than_the_interval_nor_written_more_often(schedule: list[tuple[float, int]]) -> None:
    changes: DueRecords[GroupRecord] = DueRecords(1.0)
    now, last, known = 0.0, float("-inf"), -1
    for gap, running in schedule:
        now += gap
        wrote = written(changes, msgspec.structs.replace(RECORD, load=GroupLoad(running=running)), now)
        if wrote:
            assert now - last >= 1.0
            last, known = now, running
        assert running == known or now - last < 1.0
