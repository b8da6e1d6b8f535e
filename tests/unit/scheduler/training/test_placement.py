"""Which host trains which fine-tuning job: never two at a time, fair to tenants, and whoever is gone is replaced."""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.models.cluster import ClusterView
from services.scheduler.training.placement import (
    GONE_AFTER,
    REFUSED_FOR,
    REPEAT,
    SILENT_AFTER,
    TrainingDecisions,
    TrainingPlacer,
)
from shared.messages import (
    GroupLoad,
    GroupRecord,
    HostBeat,
    HostModel,
    HostRecord,
    HostTraining,
    ModelSpec,
    StartTraining,
    StopTraining,
)
from shared.messages.training import Hyperparameters, TrainedAdapter, TrainingJob, TrainingMetrics
from shared.nats.tenants import tenant_key

BEGIN = 1_700_000_000.0
GB = 1_000_000_000


class World:
    """Hosts that obey, and records that are written at once."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.view = ClusterView()
        self.placer = TrainingPlacer(self.view)
        self.jobs: dict[str, TrainingJob] = {}
        self.places: dict[str, int] = {}
        self.running: dict[str, dict[str, int]] = {}  # by host: attempts by the keys of their jobs
        self.lacks: dict[tuple[str, str], int] = {}  # (job's key, host) that has not so many bytes for it
        self.deaf: set[str] = set()

    def host(self, name: str, places: int = 1, *, models: tuple[str, ...] = ()) -> None:
        self.places[name] = places
        self.running.setdefault(name, {})
        self._models = {**getattr(self, "_models", {}), name: models}
        self.beat()

    def group(self, host: str, model: str, *, own: bool = True, running: int = 0) -> None:
        name = f"{host}-own" if own else f"{host}/{model}"
        load = GroupLoad(running=running, slots=8)
        self.view.group(GroupRecord(name, model, "ready", 1, [], load, host, memory=GB), self.now)

    def drop(self, host: str) -> None:
        del self.places[host], self.running[host]
        self.view.forget_host(host)

    def add(self, name: str, tenant: str = "t", **fields: Any) -> str:
        key = tenant_key(tenant, name)
        values: dict[str, Any] = {"status": "queued", "base": ModelSpec("m", "org/m"), **fields}
        created = values.pop("created_at", BEGIN + len(self.jobs))
        self.jobs[key] = TrainingJob(name, tenant, created, "m", "supervised", "f", "f", 1, **values)
        return key

    def beat(self) -> None:
        for name, places in self.places.items():
            trainings = [
                HostTraining(self.jobs[key].id, self.jobs[key].tenant, attempt, "training", memory=GB)
                if key in self.jobs
                else HostTraining(key.partition(".")[2], key.partition(".")[0], attempt, "training")
                for key, attempt in self.running[name].items()
            ]
            models = [HostModel(model, "stored") for model in self._models[name]]
            beat = HostBeat(8 * GB, 0, 0, models, trains=places, trainings=trainings)
            self.view.host(HostRecord(name, beat, "ready"))

    def step(self, seconds: float = 1.0) -> TrainingDecisions:
        self.now += seconds
        self.beat()
        decisions = self.placer.decide(self.jobs, self.now)
        self.jobs.update(decisions.changes)
        for host, command in decisions.commands:
            if host in self.running and host not in self.deaf:
                self._obey(host, command)
        return decisions

    def _obey(self, host: str, command: Any) -> None:
        key = tenant_key(command.tenant, command.job)
        job = self.jobs.get(key)
        mine = job is not None and host in job.hosts and job.attempt == command.attempt
        if isinstance(command, StopTraining):
            if not mine:
                self.running[host].pop(key, None)
        elif (key, host) in self.lacks:
            self.placer.refused(key, host, self.lacks[key, host], "It is too large.")
        elif mine and (key in self.running[host] or len(self.running[host]) < self.places[host]):
            self.running[host][key] = command.attempt

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def end(self, key: str) -> None:
        """A host is done with it."""
        job = self.jobs[key]
        adapter = TrainedAdapter(1, "d", 1, 1, 1, TrainingMetrics(1))
        self.jobs[key] = msgspec.structs.replace(job, host="", result=adapter)
        for host in job.hosts:
            self.running[host].pop(key, None)


def test_a_job_is_given_to_a_host_and_told_until_it_shows_it() -> None:
    world = World()
    world.host("h")
    world.deaf.add("h")
    key = world.add("a")
    world.step()
    assert (world.jobs[key].host, world.jobs[key].attempt) == ("h", 1)
    assert world.step().commands == [("h", StartTraining("a", "t", 1))]
    assert not world.step(REPEAT / 2).commands
    assert world.step(REPEAT).commands == [("h", StartTraining("a", "t", 1))]
    world.deaf.clear()
    world.run(2 * REPEAT)
    assert world.running["h"] == {key: 1}
    assert not world.step(REPEAT).commands, "it shows it"


def test_one_whose_host_is_gone_or_silent_goes_to_another() -> None:
    world = World()
    world.host("h")
    key = world.add("a")
    world.run(3)
    world.host("i")
    world.drop("h")
    world.run(GONE_AFTER + 2)
    assert world.running == {"i": {key: 2}}
    world.deaf.add("i")
    world.running["i"].clear()
    world.host("j")
    world.run(SILENT_AFTER - 5)
    assert world.jobs[key].host == "i", "it may be busy"
    world.run(8)
    assert world.running["j"] == {key: 3}


def test_one_that_has_come_back_with_an_old_attempt_is_stopped() -> None:
    world = World()
    world.host("h")
    key = world.add("a")
    world.run(3)
    world.host("i")
    old = dict(world.running["h"])
    world.drop("h")
    world.run(GONE_AFTER + 2)
    world.host("h")
    world.running["h"] = old
    assert ("h", StopTraining("a", "t", 1)) in world.step().commands
    assert world.running == {"i": {key: 2}, "h": {}}


def test_what_nobody_wants_any_more_of_a_host_that_is_gone_has_no_host() -> None:
    world = World()
    world.host("h")
    key = world.add("a")
    world.run(3)
    world.jobs[key] = msgspec.structs.replace(world.jobs[key], wanted="cancel")
    world.host("i")
    world.drop("h")
    world.run(GONE_AFTER + 2)
    assert (world.jobs[key].host, world.running["i"]) == ("", {})


def test_tenants_have_turns_and_of_each_the_oldest_comes_first() -> None:
    world = World()
    world.host("h", places=3)
    loud = [world.add(f"loud-{number}", "loud") for number in range(5)]
    quiet = world.add("quiet", "quiet")
    decisions = world.step()
    assert decisions.running == 3
    assert {key for key, job in world.jobs.items() if job.host} == {loud[0], loud[1], quiet}
    assert world.jobs[loud[2]].waiting_for.startswith("All places")
    world.run(3)
    world.end(loud[0])
    world.run(3)
    assert world.jobs[loud[2]].host == "h"


def test_hosts_that_serve_the_base_come_first_then_those_that_have_its_files_then_idle_ones() -> None:
    world = World()
    world.host("empty")
    world.host("stored", models=("m",))
    world.host("serving")
    world.group("serving", "m", running=1)
    world.host("busy", models=("m",))
    world.group("busy", "other", running=1)
    order = []
    for number in range(4):
        key = world.add(f"job-{number}")
        world.step()
        order.append(world.jobs[key].host)
    assert order == ["serving", "stored", "busy", "empty"]


def test_a_base_that_only_one_executor_has_is_trained_there() -> None:
    world = World()
    world.host("h")
    key = world.add("a", base=ModelSpec("m", ""))
    world.step()
    assert "serves its base m" in world.jobs[key].waiting_for
    world.host("own")
    world.group("own", "m")
    world.step()
    assert world.jobs[key].host == "own"


def test_one_without_room_is_asked_again_when_it_has() -> None:
    world = World()
    world.host("h", places=2)
    key = world.add("a")
    world.lacks[key, "h"] = 100 * GB
    world.run(3)
    assert world.jobs[key].waiting_for == "No executor with a free place takes it: It is too large."
    attempts = world.jobs[key].attempt
    world.run(REFUSED_FOR / 2)
    assert world.jobs[key].attempt == attempts
    world.lacks[key, "h"] = GB
    world.run(REFUSED_FOR)
    del world.lacks[key, "h"]
    world.run(REFUSED_FOR)
    assert world.running["h"] == {key: world.jobs[key].attempt}


@pytest.mark.parametrize(
    "fields", [{"status": "paused"}, {"status": "validating_files"}, {"wanted": "pause"}, {"wanted": "cancel"}]
)
def test_what_is_not_to_be_trained_has_no_host(fields: dict[str, Any]) -> None:
    world = World()
    world.host("h")
    key = world.add("a", **fields)
    world.run(5)
    assert world.jobs[key].host == ""


def test_one_that_crashed_waits_for_its_time_and_says_so_all_the_while() -> None:
    world = World()
    world.host("h")
    key = world.add("a", retry_at=BEGIN + 10, waiting_for="It is tried again in 10 s.")
    world.run(5)
    assert (world.jobs[key].host, world.jobs[key].waiting_for) == ("", "It is tried again in 10 s.")
    world.run(8)
    assert world.running["h"] == {key: 1}


def test_without_any_host_that_trains_it_is_said_so() -> None:
    world = World()
    world.host("h", places=0)
    key = world.add("a")
    assert world.step().waiting == 1
    assert "RYZANSTEIN_TRAINS" in world.jobs[key].waiting_for
    assert not world.step().changes, "it is not written again"


def replicas(count: int) -> dict[str, Any]:
    return {"hyperparameters": Hyperparameters(replicas=count)}


def test_one_of_several_replicas_has_as_many_hosts_or_none() -> None:
    world = World()
    world.host("h", places=2)
    key = world.add("a", **replicas(3))
    world.step()
    assert world.jobs[key].waiting_for.startswith("It is trained by 3 executors side by side, and 1 can take it")
    world.host("i")
    world.host("j")
    other = world.add("b", created_at=BEGIN - 1)
    world.step()
    assert world.jobs[other].host == "h", "which has two places"
    world.run(3)
    hosts = world.jobs[key].hosts
    assert sorted(hosts) == ["h", "i", "j"]
    assert [world.running[host][key] for host in hosts] == [1, 1, 1]
    last = world.add("c", **replicas(2))
    world.step()
    assert (world.jobs[last].hosts, world.jobs[last].waiting_for) == (
        [],
        "It begins when 2 executors have a free place at a time; 0 have one.",
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_whichever_of_its_hosts_is_lost_the_job_is_given_anew_as_a_whole(lost: int) -> None:
    world = World()
    for name in "hij":
        world.host(name)
    key = world.add("a", **replicas(2))
    world.run(3)
    world.jobs[key] = msgspec.structs.replace(world.jobs[key], meeting="1.2.3.4:5")
    gone = world.jobs[key].hosts[lost]
    world.drop(gone)
    world.run(GONE_AFTER + 6)  # until the other one has ended its part
    job = world.jobs[key]
    assert (job.attempt, job.meeting, gone in job.hosts, len(job.hosts)) == (2, "", False, 2)
    world.run(5)
    assert all(world.running[host] == {key: 2} for host in job.hosts)


def test_where_one_of_its_hosts_has_no_room_another_gets_its_part() -> None:
    world = World()
    for name in "hi":
        world.host(name)
    key = world.add("a", **replicas(2))
    world.lacks[key, "i"] = 100 * GB
    world.run(8)
    assert world.jobs[key].waiting_for == "Of 2 executors with a free place 1 take it: It is too large."
    assert not world.jobs[key].hosts
    assert not world.running["h"], "its part is of no use"
    world.host("j")
    world.run(5)
    assert sorted(world.jobs[key].hosts) == ["h", "j"]


class Lives(RuleBasedStateMachine):
    """Hosts come, go, fall silent; jobs come, end, are cancelled: no host has more than its places, nobody trains what
    the record does not name it for after a while, and what can be trained is."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.count = 0

    @rule(places=st.integers(0, 2))
    def come(self, places: int) -> None:
        self.count += 1
        self.world.host(f"h{self.count}", places)

    @rule(pick=st.integers(0, 9))
    def go(self, pick: int) -> None:
        if names := sorted(self.world.places):
            self.world.drop(names[pick % len(names)])

    @rule(tenant=st.sampled_from("abc"), count=st.sampled_from([1, 1, 2]))
    def submit(self, tenant: str, count: int) -> None:
        self.count += 1
        self.world.add(f"j{self.count}", tenant, **replicas(count))

    @rule(pick=st.integers(0, 9))
    def end(self, pick: int) -> None:
        world = self.world
        trained = [
            key
            for key, job in sorted(world.jobs.items())
            if job.host and all(key in world.running.get(host, {}) for host in job.hosts)
        ]
        if trained:
            world.end(trained[pick % len(trained)])

    @rule(pick=st.integers(0, 9))
    def forget(self, pick: int) -> None:
        if hosts := [on for on in self.world.running.values() if on]:
            hosts[pick % len(hosts)].clear()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.world.step(seconds)

    @invariant()
    def places_hold(self) -> None:
        for name, running in self.world.running.items():
            assert len(running) <= self.world.places[name]

    def teardown(self) -> None:
        world = self.world
        world.run(2 * SILENT_AFTER)
        free = {host: places - len(world.running[host]) for host, places in world.places.items()}
        for key, job in world.jobs.items():
            hosts = [host for host, on in world.running.items() if key in on]
            assert sorted(job.hosts) == sorted(hosts) == sorted(set(hosts))
            assert all(world.running[host][key] == job.attempt for host in hosts)
            if job.result is None:
                wanted = job.hyperparameters.replicas
                assert len(hosts) in (0, wanted), "all or none"
                assert hosts or sum(places > 0 for places in free.values()) < wanted, "there was room"


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase
