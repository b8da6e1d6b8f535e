"""What is counted record by record is what a count from nothing gives; no host is better than the one that is found."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.models.cluster import ClusterView, Host, Replica
from services.scheduler.models.demand import Demand
from services.scheduler.models.eviction import Worth, cheapest
from services.scheduler.models.failures import Failures
from services.scheduler.models.host_selection import RoomSearch
from services.scheduler.models.plans import Plans
from shared.messages import GroupLoad, GroupRecord, HostBeat, HostModel, HostRecord
from shared.messages.registry import HostTraining
from tests.unit.scheduler.models.exporting import Export, ExportingBeat
from tests.unit.scheduler.models.hosts import BEGIN, GB, spec

MODELS = tuple("abc")
SPECS = {name: spec(name) for name in MODELS}

host_beats = st.builds(
    lambda name, memory, used, takes, states, gone: HostRecord(
        name,
        HostBeat(
            memory * GB,
            used * GB,
            0,
            [
                HostModel(model, state, memory=20 * GB, load_seconds=seconds)
                for model, (state, seconds) in states.items()
            ],
            takes_models=takes,
        ),
        "gone" if gone else "ready",
    ),
    st.sampled_from(["h1", "h2", "h3", "h4"]),
    st.integers(10, 100),
    st.integers(0, 60),
    st.sampled_from([True, True, True, False]),
    st.dictionaries(
        st.sampled_from(MODELS),
        st.tuples(st.sampled_from(["stored", "sleeping", "loading", "failed"]), st.sampled_from([1.0, 9.0])),
    ),
    st.sampled_from([False, False, False, True]),
)
group_beats = st.builds(
    lambda host, model, number, state, running, slots, memory: GroupRecord(
        f"{host}/{model}/{number}",
        model,
        state,
        1,
        [],
        GroupLoad(running=running, slots=slots),
        host,
        memory=memory * GB,
    ),
    st.sampled_from(["h1", "h2", "h3", "h4"]),
    st.sampled_from(MODELS),
    st.integers(1, 2),
    st.sampled_from(["starting", "ready", "ready", "draining", "gone"]),
    st.integers(0, 2),
    st.sampled_from([4, 8]),
    st.integers(0, 30),
)


def told(records: list[HostRecord | GroupRecord]) -> ClusterView:
    view = ClusterView()
    view.keep({name: name for name in MODELS})
    for at, record in enumerate(records):
        if isinstance(record, HostRecord):
            view.host(record)
        else:
            view.group(record, BEGIN + at)
    return view


@given(st.lists(host_beats | group_beats, max_size=30))
def test_counts_and_indexes_are_those_of_a_count_from_nothing(records: list[HostRecord | GroupRecord]) -> None:
    view = told(records)
    for model in MODELS:
        known, groups = view.replicas(model), list(view.of(model))
        staying = [group for group in groups if not group.draining]
        assert known.staying == len(staying)
        assert known.inside == sum(group.inside for group in staying)
        assert known.slots == max((group.load.slots for group in groups), default=0)
        told_by = {host.number for host in view.hosts.values() if model in host.models}
        assert set(view.knowing(model)) == told_by
    for host in view.hosts.values():
        groups = [group for model in MODELS for group in view.of(model) if group.host == host.name]
        assert set(host.replicas) == {group.group for group in groups}
        assert host.free == host.memory - max(host.used_by_beat, sum(group.memory for group in groups))
        assert host.idle == sum(group.memory for group in groups if group.idle and group.ready)
    takes = [host for host in view.hosts.values() if host.takes]
    assert list(view.free) == sorted(takes, key=lambda host: (-host.share_free, host.number))


def best_cost(view: ClusterView, plans: Plans, worth: Worth, model: str) -> tuple[bool, float]:
    """Looks at every host: whether it has the model, and the cost of the load there, of the best."""
    homes = {group.host for group in view.of(model)}
    best = True, math.inf
    for host in view.hosts.values():
        size = view.size(model, host)
        if not host.takes or size > host.memory:
            continue
        cost = 3 * view.load_seconds(model, host)
        if host.free < size:
            found = cheapest(
                candidates(view, worth, host, model),
                size - host.free,
                lambda group, host=host: worth.of(group, host, spare=plans.staying(group.model) > 1),  # type: ignore[misc]
            )
            cost += math.inf if found is None else found[1]
        if cost < math.inf:
            best = min(best, (host.name in homes, cost))
    return best


def candidates(view: ClusterView, worth: Worth, host: Host, model: str) -> list[Replica]:
    return [
        group
        for group in host.replicas.values()
        if group.model != model and group.idle and not group.draining
        if view.obeys(group) and not worth.stays(group, host, model)
    ]


@given(st.lists(host_beats, min_size=1, max_size=6), st.lists(group_beats, max_size=12), st.integers(0, 4))
def test_no_host_would_have_been_better(hosts: list[HostRecord], groups: list[GroupRecord], taken: int) -> None:
    view = told([*hosts, *groups])
    now = BEGIN + 1000.0
    demand = {"a": Demand(3, now, now, 1.0, 0.1), "b": Demand(0, now, now, 0.5, 0.01), "c": Demand(0, 0.0, now)}
    plans, worth = Plans(view), Worth(view, SPECS, demand, now)
    for number in range(taken + 1):  # what was promised since counts too
        search = RoomSearch(view, plans, Failures(), worth, demand, turn=0)
        found = search.find("a", now, "idle")
        expected = best_cost(view, plans, worth, "a")
        if found is None:
            assert expected[1] == math.inf
            return
        homes = {group.host for group in view.of("a")}
        assert (found.host.name in homes, found.cost) == expected
        freed = sum(replica.memory for replica in found.victims)
        assert found.host.free + freed >= view.size("a", found.host)
        if found.victims:
            return
        found.host.promise(f"promised {number}", max(1, view.size("a", found.host)))


def test_jobs_of_every_kind_take_memory() -> None:
    view = ClusterView()
    beat = ExportingBeat(
        memory=10 * GB,
        trains=1,
        trainings=[HostTraining("job", "t", 1, "training", memory=3 * GB)],
        exports=[Export("one", memory=GB), Export("two", memory=2 * GB)],
    )
    view.host(HostRecord("h", beat, "ready"))
    assert view.hosts["h"].room_for_jobs == 4 * GB
    view.host(HostRecord("h", ExportingBeat(memory=10 * GB), "ready"))
    assert view.hosts["h"].room_for_jobs == 10 * GB
