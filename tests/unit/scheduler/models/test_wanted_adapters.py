"""Which adapters are read next, and by whom: as hosts have, fetch and lose the files of their bases."""

from typing import Any

import pytest

from services.scheduler.models.cluster import ClusterView
from services.scheduler.models.wanted_adapters import AT_ONCE, FIRST_PAUSE, LATER, LONGEST_PAUSE, TRIED, WantedAdapters
from shared.messages import GroupLoad, GroupRecord, HostBeat, HostModel, HostRecord, ModelSpec
from shared.messages.registry import AdapterRecord, WantedAdapter

NOW = 1_700_000_000.0
SPECS = {"base": ModelSpec("base", "org/base")}


def record(name: str, **fields: Any) -> AdapterRecord:
    wanted = WantedAdapter("base", f"org/{name}", **fields)
    return AdapterRecord(name, "base", f"org/{name}", "", 0, 0, wanted=wanted)


def host(name: str, *said: HostModel, takes: bool = True, memory: int = 10) -> HostRecord:
    return HostRecord(name, HostBeat(memory, models=list(said), takes_models=takes), "ready")


def group(name: str, state: Any, instance: str) -> GroupRecord:
    return GroupRecord(name, "base", state, 1, [], GroupLoad(), instance)


@pytest.fixture
def cluster() -> ClusterView:
    return ClusterView()


@pytest.fixture
def wanted(cluster: ClusterView) -> WantedAdapters:
    made = WantedAdapters(cluster)
    made.note("sql", record("sql"))
    return made


def test_nothing_is_read_while_nobody_could(cluster: ClusterView, wanted: WantedAdapters) -> None:
    cluster.host(host("h", takes=False))
    assert wanted.due(SPECS, NOW) == []
    assert len(wanted) == 1


def test_who_serves_the_base_is_asked_first_and_then_who_has_its_files(
    cluster: ClusterView, wanted: WantedAdapters
) -> None:
    cluster.host(host("a"))
    cluster.host(host("b", HostModel("base", "stored")))
    cluster.host(host("own", takes=False))
    cluster.group(group("g", "ready", "own"), NOW)
    cluster.group(group("late", "starting", "a"), NOW)
    (reading,) = wanted.due(SPECS, NOW)
    assert (reading.name, reading.hosts, reading.base) == ("sql", ["own", "b", "a"], SPECS["base"])
    assert reading.fetch == "", "its base is there"
    assert wanted.due(SPECS, NOW) == [], "it is under way"


def test_files_of_the_base_are_fetched_by_one_host_once(cluster: ClusterView, wanted: WantedAdapters) -> None:
    for name, memory in (("a", 1), ("b", 3), ("c", 2)):
        cluster.host(host(name, memory=memory))
    (reading,) = wanted.due(SPECS, NOW)
    assert reading.fetch == "b"
    wanted.ended(reading, NOW, failed=False)
    assert wanted.due(SPECS, NOW + LATER / 2) == []
    cluster.host(host("b", HostModel("base", "downloading")))
    (reading,) = wanted.due(SPECS, NOW + LATER)
    assert reading.fetch == ""
    wanted.ended(reading, NOW + LATER, failed=False)
    cluster.host(host("b", HostModel("base", "failed", error="It is gone."), memory=3))
    (reading,) = wanted.due(SPECS, NOW + 2 * LATER)
    assert reading.fetch == "c", "where it has failed it is not fetched again"


@pytest.mark.parametrize("spec", [ModelSpec("base", "org/base", least=1), None])
def test_a_base_that_is_on_its_way_or_not_registered_is_fetched_by_nobody(
    cluster: ClusterView, wanted: WantedAdapters, spec: ModelSpec | None
) -> None:
    cluster.host(host("a"))
    (reading,) = wanted.due({} if spec is None else {"base": spec}, NOW)
    assert (reading.fetch, reading.hosts) == ("", ["a"])


def test_what_could_not_be_read_is_read_again_ever_later(cluster: ClusterView, wanted: WantedAdapters) -> None:
    cluster.host(host("a"))
    now, pauses = NOW, []
    for _ in range(8):
        (reading,) = wanted.due(SPECS, now)
        wanted.ended(reading, now, failed=True)
        wanted.note("sql", record("sql", error="It is no adapter."))
        pause = min(FIRST_PAUSE * 2 ** len(pauses), LONGEST_PAUSE)
        assert wanted.due(SPECS, now + pause - 1) == []
        pauses.append(pause)
        now += pause
    assert pauses[-2:] == [LONGEST_PAUSE] * 2
    wanted.note("sql", record("sql", since=now))  # ordered anew
    assert len(wanted.due(SPECS, now - pause)) == 1


def test_what_is_not_wanted_any_more_is_forgotten(cluster: ClusterView, wanted: WantedAdapters) -> None:
    cluster.host(host("a"))
    (reading,) = wanted.due(SPECS, NOW)
    wanted.note("sql", AdapterRecord("sql", "base", "org/sql", "d", 8, 1))
    wanted.ended(reading, NOW, failed=True)
    assert wanted.due(SPECS, NOW) == []
    assert len(wanted) == 0
    wanted.note("sql", record("sql"))
    assert len(wanted.due(SPECS, NOW)) == 1, "no pause is left of before"


def test_a_few_are_read_at_a_time_each_by_a_few_hosts(cluster: ClusterView, wanted: WantedAdapters) -> None:
    for number in range(2 * TRIED):
        cluster.host(host(f"h{number}"))
    for number in range(2 * AT_ONCE):
        wanted.note(f"a{number}", record(f"a{number}"))
    readings = wanted.due(SPECS, NOW)
    assert len(readings) == AT_ONCE
    assert {len(reading.hosts) for reading in readings} == {TRIED}
    wanted.ended(readings[0], NOW, failed=True)
    assert len(wanted.due(SPECS, NOW)) == 1


def test_those_that_wait_for_their_base_keep_nobody_from_a_turn(cluster: ClusterView, wanted: WantedAdapters) -> None:
    cluster.host(host("h"))
    names = {"sql", *(f"a{number}" for number in range(4 * AT_ONCE))}
    for name in names - {"sql"}:
        wanted.note(name, record(name))
    tried: set[str] = set()
    for step in range(2 * len(names) // AT_ONCE):
        for reading in wanted.due(SPECS, NOW + step * LATER):
            tried.add(reading.name)
            wanted.ended(reading, NOW + step * LATER, failed=False)
    assert tried == names
