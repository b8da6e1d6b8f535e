"""Placement of models: memory, pins and streams are safe whatever happens, and what can be served is."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from services.scheduler.models.placement import REPEAT, REPEATS, SEARCHES, ModelPlacer
from shared.messages import HostBeat, HostRecord, LoadModel, UnloadModel
from tests.unit.scheduler.models.hosts import BEGIN, GB, FakeCluster, FakeGroup, spec


def one_host(memory: int = 80, devices: int = 0, **sizes: int) -> FakeCluster:
    cluster = FakeCluster({name: size * GB for name, size in (sizes or {"a": 50, "b": 50}).items()})
    host = cluster.add_host("h1", memory * GB, devices)
    host.stored.update(dict.fromkeys(cluster.sizes, "stored"))
    return cluster


def test_a_model_that_is_asked_for_is_loaded_and_its_group_is_named_after_host_and_model() -> None:
    cluster = one_host()
    cluster.register(spec("a"), spec("b"))
    assert not cluster.step().commands
    cluster.ask("a")
    said = cluster.step()
    assert [(c.host, c.command.group, c.reason) for c in said.commands] == [("h1", "h1/a", "demand")]
    assert said.placements["a"].hosts == ["h1"]
    assert cluster.now < said.placements["a"].expected_at <= cluster.now + 10
    assert not cluster.step(0.0).commands  # asked twice: nothing new
    said = cluster.run(10)
    assert cluster.serving("a")
    assert said.placements["a"].expected_at == 0


def test_the_least_is_there_and_comes_back_on_another_host() -> None:
    cluster = one_host()
    cluster.add_host("h2", 80 * GB)
    cluster.register(spec("a", least=1))
    cluster.run(10)
    assert len(cluster.serving("a")) == 1
    lost = next(host.name for host in cluster.hosts.values() if host.groups)
    cluster.drop_host(lost)
    cluster.run(10)
    assert len(cluster.serving("a")) == 1


def test_replicas_are_spread_over_hosts_and_numbered_on_one() -> None:
    cluster = one_host(a=20)
    cluster.add_host("h2", 80 * GB)
    cluster.register(spec("a", least=3, most=3))
    cluster.run(10)
    assert {len(host.groups) for host in cluster.hosts.values()} == {1, 2}
    assert any(name.endswith("/a/2") for host in cluster.hosts.values() for name in host.groups)


def test_the_one_that_is_asked_for_least_makes_room() -> None:
    cluster = one_host(memory=100, a=50, b=50, c=50)
    cluster.register(spec("a"), spec("b"), spec("c"))
    cluster.ask("a", 20)
    cluster.ask("b", 1)
    cluster.run(60)
    cluster.demand["a"].popularity, cluster.demand["b"].popularity = 0.1, 0.0001
    cluster.ask("c")
    cluster.run(15)
    assert [c.model for c in cluster.commands if isinstance(c.command, UnloadModel)] == ["b"]
    assert cluster.serving("c")
    assert cluster.serving("a")


def test_what_an_executor_was_started_with_makes_room_too_where_it_loads_models() -> None:
    cluster = one_host()
    cluster.hosts["h1"].groups["group-0"] = FakeGroup("group-0", "a", BEGIN)
    cluster.register(spec("a"), spec("b"))
    cluster.run(600)
    cluster.ask("b")
    cluster.run(15)
    assert cluster.serving("b")
    assert not cluster.serving("a")


def test_what_was_loaded_only_now_and_is_asked_for_stays_for_a_while() -> None:
    cluster = one_host()
    cluster.register(spec("a"), spec("b"))
    cluster.ask("a")
    cluster.run(7)
    cluster.ask("a", 60)
    cluster.ask("b")
    waits = cluster.step()
    assert not waits.commands
    assert waits.unplaced == ["b"]
    assert "waits for memory" in waits.placements["b"].reason
    assert waits.placements["b"].code == ""
    cluster.run(10)
    assert cluster.serving("a")
    cluster.run(20)
    assert cluster.serving("b")


def test_one_that_works_is_cordoned_and_goes_when_nothing_runs() -> None:
    cluster = one_host()
    cluster.register(spec("a"), spec("b"))
    cluster.ask("a")
    cluster.run(50)
    cluster.groups("a")[0].running = 3
    cluster.ask("b")
    said = cluster.run(20)
    assert said.placements["a"].cordoned == ["h1/a"]
    assert not any(isinstance(c.command, UnloadModel) for c in cluster.commands)
    cluster.groups("a")[0].running = 0
    cluster.run(10)
    assert cluster.serving("b")


def test_a_replica_that_the_others_can_do_without_makes_room_at_once() -> None:
    cluster = FakeCluster({"a": 60 * GB, "b": 60 * GB})
    for name in ("h1", "h2", "h3"):
        cluster.add_host(name, 80 * GB)
    cluster.register(spec("a", least=3))
    cluster.run(60)
    cluster.register(spec("a"), spec("b"))
    first, second, third = cluster.serving("a")
    for group in (first, second, third):
        group.running = 4
    cluster.ask("b")
    assert not cluster.step().placements["a"].cordoned, "12 of the 16 places of two would be taken"
    for group in (first, second, third):
        group.running = 3
    cluster.ask("b")
    (cordoned,) = cluster.step().placements["a"].cordoned
    cluster.run(10)
    assert not cluster.serving("b"), "nothing that runs is ended"
    next(group for group in (first, second, third) if group.name == cordoned).running = 0
    cluster.run(10)
    assert cluster.serving("b")
    assert len(cluster.serving("a")) == 2


def test_beside_pinned_models_it_is_refused_with_what_would_have_to_go() -> None:
    cluster = one_host()
    cluster.register(spec("a", pinned=True, least=1), spec("b"))
    cluster.run(60)
    cluster.ask("b")
    said = cluster.step()
    assert said.placements["b"].code == "model_does_not_fit"
    assert "b takes 50.0 GB" in said.placements["b"].reason
    assert "a (50.0 GB) would have to go" in said.placements["b"].reason
    cluster.demand["b"].waiting = 0
    cluster.register(spec("a"))  # unpinned
    cluster.run(15)
    assert cluster.serving("b")


def test_one_that_is_larger_than_every_host_is_refused_for_good() -> None:
    cluster = one_host(a=100)
    cluster.register(spec("a"))
    cluster.ask("a")
    said = cluster.step()
    assert said.placements["a"].code == "model_does_not_fit"
    assert "no host has more than 80.0 GB" in said.placements["a"].reason
    cluster.demand["a"].waiting = 0
    cluster.run(60)
    cluster.add_host("big", 200 * GB)
    cluster.run(20)
    assert not cluster.groups("a")  # nobody asks any more
    assert cluster.step().placements["a"].code == ""


def test_a_size_that_nobody_knows_is_learned_from_a_refusal() -> None:
    cluster = one_host()
    cluster.hosts["h1"].stored.clear()
    cluster.register(spec("a"), spec("b"))
    cluster.ask("a")
    cluster.run(40)
    cluster.sizes["b"] = 50 * GB
    cluster.deaf = True
    cluster.ask("b")
    (command,) = cluster.step().commands
    assert isinstance(command.command, LoadModel)
    cluster.placer.refused(command, "model_does_not_fit", 50 * GB, "no room")
    (command,) = cluster.step().commands
    assert isinstance(command.command, UnloadModel)
    assert command.reason == "room"
    cluster.placer.refused(command, "invalid_request", 0, "no such group")


def test_failures_are_tried_elsewhere_then_told_then_not_tried_for_ever() -> None:
    cluster = one_host()
    cluster.add_host("h2", 80 * GB)
    cluster.register(spec("a"))
    cluster.failing = {("a", "h1"): 0.0, ("a", "h2"): 0.0}
    cluster.ask("a")
    said = cluster.run(8)
    assert {c.host for c in cluster.commands} == {"h1", "h2"}
    assert said.placements["a"].code == "no_group_available"
    assert "could not be loaded on 2 hosts" in said.placements["a"].reason
    assert "It is broken" in said.placements["a"].reason
    for _ in range(400):
        cluster.step(10.0)
        cluster.demand["a"].last = cluster.now
    assert len(cluster.commands) <= 12
    cluster.failing.clear()
    cluster.register(spec("a", action="load", action_at=cluster.now))
    cluster.run(10)
    assert cluster.serving("a")


def test_a_host_that_finds_no_room_once_it_has_the_files_gets_room_made_for_it() -> None:
    cluster = one_host(a=50)
    cluster.sizes["b"] = 50 * GB
    cluster.unfetched.add("b")
    cluster.register(spec("a"), spec("b"))
    cluster.ask("a")
    cluster.run(600)
    cluster.ask("b")
    cluster.run(15)
    assert cluster.serving("b"), "it is no fault of the model's, which would be put off"
    assert not cluster.serving("a")


def test_commands_that_are_not_seen_are_repeated_and_not_for_ever() -> None:
    cluster = one_host(a=50)
    cluster.deaf = True
    cluster.register(spec("a"))
    cluster.ask("a")
    cluster.run(REPEAT * (REPEATS + 1))
    assert 2 <= len(cluster.commands) <= REPEATS + 2
    assert cluster.commands[1].repeated
    assert "shown nothing" in cluster.step().placements["a"].reason


def test_load_and_unload_by_name() -> None:
    cluster = one_host(devices=1)
    cluster.register(spec("a", action="load", action_at=BEGIN), spec("b"))
    cluster.run(10)
    assert cluster.serving("a")
    cluster.groups("a")[0].running = 1
    cluster.register(spec("a", action="unload", action_at=cluster.now, least=1))
    said = cluster.step()
    assert not said.commands
    assert said.placements["a"].cordoned == ["h1/a"]
    cluster.register(spec("a", action="unload", action_at=cluster.now, force=True))
    (command,) = cluster.step().commands
    assert isinstance(command.command, UnloadModel)
    assert command.command.force
    assert not command.command.sleep
    cluster.run(20)
    assert not cluster.groups("a")
    cluster.ask("a")  # a request brings it back
    cluster.run(10)
    assert cluster.serving("a")


def test_an_unload_lets_what_waits_already_be_served_first() -> None:
    cluster = one_host()
    cluster.register(spec("a"))
    cluster.ask("a")
    cluster.step()
    cluster.register(spec("a", action="unload", action_at=cluster.now))  # in the middle of the load
    said = cluster.run(3)
    assert said.placements["a"].hosts == ["h1"]
    assert not said.placements["a"].cordoned
    (group,) = cluster.groups("a")
    assert not group.draining
    cluster.run(30)
    assert cluster.now > group.ready_at
    assert not cluster.groups("a"), "it goes then"
    assert [type(c.command) for c in cluster.commands] == [LoadModel, UnloadModel]


def test_a_scheduler_that_takes_over_does_not_carry_out_again_what_was_done() -> None:
    cluster = one_host(a=20, b=20, c=20)
    cluster.register(spec("a", action="load", action_at=BEGIN), spec("b", least=1), spec("c"))
    cluster.run(10)
    unload = cluster.now
    cluster.register(
        spec("b", least=1, action="unload", action_at=unload), spec("c", action="unload", action_at=unload)
    )
    cluster.run(10)
    assert not cluster.serving("b")
    cluster.ask("b")  # which brings it back
    cluster.run(10)
    cluster.register(spec("a", action="load", action_at=BEGIN, idle=5.0))
    said = cluster.run(10)
    assert (bool(cluster.serving("a")), bool(cluster.serving("b"))) == (False, True)
    cluster.placer = ModelPlacer(cluster.view)
    for placement in said.placements.values():
        cluster.placer.observe(placement)
    cluster.demand.clear()  # it has not heard of any request
    cluster.commands.clear()
    cluster.run(20)
    assert not cluster.commands


def test_idle_models_sleep_on_gpus_and_a_removed_one_goes() -> None:
    cluster = one_host(devices=1)
    cluster.register(spec("a", idle=30.0), spec("b"))
    cluster.ask("a")
    cluster.run(20)
    assert cluster.serving("a")
    cluster.run(30)
    assert not cluster.groups("a")
    assert cluster.hosts["h1"].stored["a"] == "sleeping"
    cluster.ask("b")
    cluster.run(10)
    del cluster.specs["b"]
    cluster.run(3)
    assert not cluster.groups("b")
    assert {c.reason for c in cluster.commands} == {"demand", "idle", "removed"}


def test_groups_of_no_registry_are_left_alone_and_count_as_used() -> None:
    cluster = one_host()
    host = cluster.hosts["h1"]
    host.groups["h1"] = FakeGroup("h1", "own", cluster.now)
    cluster.sizes["own"] = 40 * GB
    cluster.register(spec("a"))
    cluster.ask("a")
    said = cluster.run(100)
    assert "own (40.0 GB) would have to go" in said.placements["a"].reason
    assert list(host.groups) == ["h1"]


def test_more_replicas_come_with_the_queue_and_not_beyond_most() -> None:
    cluster = FakeCluster({"a": 20 * GB})
    for number in range(5):
        cluster.add_host(f"h{number}", 80 * GB)
    cluster.register(spec("a", most=3))
    cluster.ask("a")
    cluster.run(10)
    for _ in range(60):
        for group in cluster.serving("a"):
            group.running = 8
        cluster.step()
    assert len(cluster.serving("a")) == 3


def test_what_another_scheduler_has_ordered_is_not_ordered_again() -> None:
    cluster = one_host(a=50)
    cluster.add_host("h2", 80 * GB)
    cluster.register(spec("a"))
    cluster.hosts["h2"].stored["a"] = "loading"
    cluster.ask("a")
    said = cluster.step()
    assert not said.commands
    assert said.placements["a"].hosts == ["h2"]
    assert said.placements["a"].expected_at > cluster.now


def test_it_looks_again_as_soon_as_a_group_has_ended_its_work() -> None:
    cluster = one_host()
    cluster.register(spec("a"), spec("b"))
    cluster.ask("a")
    cluster.run(50)
    cluster.groups("a")[0].running = 1
    cluster.ask("b")
    assert not cluster.step(0.01).commands
    cluster.groups("a")[0].running = 0
    assert [command.model for command in cluster.step(0.01).commands] == ["a"]


def test_many_loads_are_planned_in_several_passes() -> None:
    names = [f"m{at}" for at in range(SEARCHES + 4)]
    cluster = FakeCluster(dict.fromkeys(names, GB))
    cluster.add_host("h", 80 * GB).stored.update(dict.fromkeys(names, "stored"))
    cluster.register(*map(spec, names))
    for name in names:
        cluster.ask(name)
    first = cluster.step(0.01)
    assert first.more
    assert len(first.commands) == SEARCHES
    second = cluster.step(0.01)
    assert not second.more
    assert len(second.commands) == 4


def test_no_host_is_no_refusal() -> None:
    cluster = FakeCluster({"a": GB})
    cluster.register(spec("a"))
    cluster.ask("a")
    said = cluster.step()
    assert said.unplaced == ["a"]
    assert said.placements["a"].code == ""
    beat = HostBeat(GB, 0, takes_models=False)
    cluster.view.host(HostRecord("old", beat, "ready"))
    assert "no executor" in cluster.step().placements["a"].reason


@given(
    st.lists(st.sampled_from([80, 160, 320]), min_size=1, max_size=4),
    st.lists(st.integers(1, 80), min_size=1, max_size=8),
)
@settings(max_examples=25)
def test_every_model_that_is_asked_for_and_fits_is_loaded(hosts: list[int], sizes: list[int]) -> None:
    cluster = FakeCluster({f"m{at}": size * GB for at, size in enumerate(sizes)})
    for at, memory in enumerate(hosts):
        cluster.add_host(f"h{at}", memory * GB)
    cluster.register(*(spec(name) for name in cluster.sizes))
    served = set()
    for name in cluster.sizes:
        cluster.ask(name)
    for _ in range(600):
        cluster.step(2.0)
        served |= {name for name in cluster.sizes if cluster.serving(name)}
    assert served == set(cluster.sizes)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.lists(st.floats(0.0, 2.0), min_size=6, max_size=6))
@settings(max_examples=25)
def test_under_constant_demand_nothing_comes_and_goes(sizes: list[int], rates: list[float]) -> None:
    cluster = FakeCluster({f"m{at}": size * GB for at, size in enumerate(sizes)})
    cluster.add_host("h0", 120 * GB)
    cluster.add_host("h1", 120 * GB)
    cluster.register(*(spec(name, most=2, idle=300.0) for name in cluster.sizes))
    for second in range(300):
        if second == 60:
            cluster.commands.clear()
        for at, name in enumerate(cluster.sizes):
            waiting = cluster.demand[name].waiting if name in cluster.demand else 1
            cluster.ask(name, waiting)
            cluster.demand[name].popularity = rates[at]
        cluster.step()
    assert not cluster.commands
    assert all(cluster.serving(name) for name in cluster.sizes)


class Cluster(RuleBasedStateMachine):
    """Hosts come and go, models are asked for, pinned, run; each command is checked as it is obeyed."""

    @initialize(memory=st.lists(st.sampled_from([60, 100, 200]), min_size=1, max_size=3))
    def begin(self, memory: list[int]) -> None:
        self.cluster = FakeCluster({f"m{at}": (10 + 15 * at) * GB for at in range(5)})
        for at, size in enumerate(memory):
            self.cluster.add_host(f"h{at}", size * GB, devices=at % 2)
        self.cluster.register(*(spec(name, created=at) for at, name in enumerate(self.cluster.sizes)))

    @rule(model=st.integers(0, 4), waiting=st.integers(1, 40))
    def ask(self, model: int, waiting: int) -> None:
        self.cluster.ask(f"m{model}", waiting)

    @rule(model=st.integers(0, 4), running=st.integers(0, 8))
    def work(self, model: int, running: int) -> None:
        for group in self.cluster.serving(f"m{model}"):
            group.running = running

    @rule(
        model=st.integers(0, 4),
        pinned=st.booleans(),
        least=st.integers(0, 2),
        idle=st.sampled_from([0.0, 20.0]),
        action=st.sampled_from(["", "load", "unload"]),
    )
    def change(self, model: int, pinned: bool, least: int, idle: float, action: str) -> None:
        known = self.cluster.specs[f"m{model}"]
        self.cluster.register(
            msgspec.structs.replace(
                known,
                pinned=pinned,
                least=least,
                most=max(2, least),
                idle=idle,
                action=action,
                action_at=self.cluster.now,
            )
        )

    @rule(at=st.integers(0, 3), memory=st.sampled_from([60, 100, 200]))
    def host(self, at: int, memory: int) -> None:
        if f"h{at}" in self.cluster.hosts:
            self.cluster.drop_host(f"h{at}")
        else:
            self.cluster.add_host(f"h{at}", memory * GB)

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds: int) -> None:
        self.cluster.run(seconds)
        known = len(self.cluster.known)
        self.cluster.step()
        if len(self.cluster.known) > known:
            return  # a host has told a size: that is news
        again = self.cluster.placer.decide(self.cluster.specs, self.cluster.demand, self.cluster.now)
        assert not again.commands, "the same state twice says nothing new"


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=40, stateful_step_count=25)


def test_a_host_that_may_come_back_is_waited_for() -> None:
    cluster = one_host()
    cluster.add_host("h2", 80 * GB)
    cluster.register(spec("a", pinned=True, least=1), spec("b"))
    cluster.run(60)
    (pinned,) = cluster.serving("a")
    other = next(name for name in cluster.hosts if not pinned.name.startswith(f"{name}/"))
    cluster.lose_host(other)
    cluster.ask("b")
    said = cluster.step()
    assert (said.placements["b"].code, other in said.placements["b"].reason) == ("", True)
    cluster.view.forget_host(other)  # the monitor lists it no more
    assert cluster.step().placements["b"].code == "model_does_not_fit"
