"""Hosts with any number of groups: each group is judged for itself, and one that is unloaded has left."""

from services.health_monitor.detector import Detector
from services.health_monitor.registry import DueRecords
from shared.messages import GroupBeat, GroupLoad, Heartbeat, HostBeat, HostModel, HostRecord, RankBeat, ServiceRecord
from tests.unit.scheduler.models.exporting import Export, ExportingBeat

WORK = GroupLoad(running=1, free_blocks=3, total_blocks=4)
HOST = HostBeat(memory=100)


def detector() -> Detector:
    return Detector(hung_after=2.5, gone_after=4.0, forget_after=60.0)


def beat(*groups: str, progress: dict[str, int] | None = None, host: HostBeat | None = HOST) -> Heartbeat:
    said = [
        GroupBeat(
            name,
            name.upper(),
            1,
            "ready",
            [RankBeat(0, 1, 1, (progress or {}).get(name, 0), True)],
            WORK,
            memory=7,
            adapters=["ad"],
        )
        for name in groups
    ]
    first = said[0] if said else None
    return Heartbeat("executor", "executor-1", 1, "ready", "", first, groups=said, host=host)


def states(seen: Detector) -> dict[str, str]:
    return {record.group: record.state for record in seen.groups()}


def test_one_hung_group_leaves_the_others_of_its_host_ready() -> None:
    seen = detector()
    for second in range(5):
        seen.observe(beat("a", "b", progress={"a": second}), float(second))
    assert states(seen) == {"a": "ready", "b": "hung"}
    assert {(record.memory, *record.adapters) for record in seen.groups()} == {(7, "ad")}


def test_a_group_that_its_host_does_not_name_any_more_has_left_and_is_not_lost() -> None:
    seen = detector()
    seen.observe(beat("a", "b"), 0.0)
    events = seen.observe(beat("b"), 1.0)
    assert [(event.group, event.kind, event.reason) for event in events] == [("a", "down", "it was unloaded")]
    assert states(seen) == {"a": "gone", "b": "ready"}
    assert seen.lost() == set()
    assert seen.observe(beat("b"), 2.0) == []


def test_an_executor_of_a_version_that_names_one_group_loses_none_by_it() -> None:
    seen = detector()
    seen.observe(beat("a", "b"), 0.0)
    seen.observe(beat("a", host=None), 1.0)
    assert states(seen) == {"a": "ready", "b": "ready"}


def test_a_host_is_listed_as_long_as_its_service() -> None:
    seen = detector()
    failed = HostBeat(memory=9, models=[HostModel("m", "failed", error="no such file")])
    seen.observe(beat(host=failed), 0.0, 1000.0)
    assert seen.hosts() == [HostRecord("executor-1", failed, "ready", heard_at=1000.0)]
    seen.tick(4.0)
    assert seen.hosts()[0].state == "gone"
    for second in range(5, 70):
        seen.tick(float(second))
    assert seen.hosts() == []


def test_a_monitor_that_starts_anew_knows_hosts_and_learns_what_others_hear() -> None:
    old, new = HostBeat(memory=1), HostBeat(memory=2)
    seen = detector()
    service = ServiceRecord("executor", "executor-1", 1, "ready", heard_at=5.0)
    known = [HostRecord("executor-1", old, "ready"), HostRecord("forgotten", old, "gone")]
    seen.restore([service], [], 0.0, known)
    assert [record.host for record in seen.hosts()] == [old]
    seen.merge_host(HostRecord("executor-1", new, "ready", heard_at=5.1))
    assert [record.host for record in seen.hosts()] == [old], "what both have heard at once"
    seen.merge_host(HostRecord("executor-1", new, "ready", heard_at=9.0))
    assert [record.host for record in seen.hosts()] == [new]


def test_what_a_host_says_of_a_model_is_written_at_once_and_its_progress_once_in_a_while() -> None:
    changes: DueRecords[HostRecord] = DueRecords(1.0)

    def record(state: str, done: int) -> HostRecord:
        model = HostModel("m", state, done=done)  # type: ignore[arg-type]
        return HostRecord("h", HostBeat(models=[model]), "ready")

    changes.mark_written("h", record("loading", 1), 0.0)
    assert not changes.due({"h": record("loading", 2)}, 0.5).put
    assert changes.due({"h": record("loading", 2)}, 1.0).put
    assert changes.due({"h": record("failed", 1)}, 0.1).put


def test_which_jobs_a_host_has_is_written_at_once_whatever_their_kind() -> None:
    changes: DueRecords[HostRecord] = DueRecords(1.0)

    def record(*exports: Export) -> HostRecord:
        return HostRecord("h", ExportingBeat(exports=[*exports]), "ready")

    changes.mark_written("h", record(Export("one")), 0.0)
    assert not changes.due({"h": record(Export("one", done=3))}, 0.5).put
    assert changes.due({"h": record(Export("one", attempt=2))}, 0.1).put
    assert changes.due({"h": record()}, 0.1).put
