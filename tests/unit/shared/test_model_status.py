"""The status of a model, out of what the registry, groups and hosts say."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import GroupLoad, GroupRecord, HostBeat, HostModel, HostRecord, ModelSpec
from shared.model_status import JUST_ASKED, ModelStatus, statuses

NOW = 1_800_000_000.0
SPEC = ModelSpec("m", "hub/m")


def group(state: str, *, name: str = "h1/m", model: str = "m", **more: Any) -> GroupRecord:
    return GroupRecord(name, model, state, 1, [], GroupLoad(), instance=name.partition("/")[0], **more)  # type: ignore[arg-type]


def host(*models: HostModel, name: str = "h1", state: Any = "ready") -> HostRecord:
    return HostRecord(name, HostBeat(models=list(models)), state)


def said(state: Any, **more: Any) -> HostModel:
    return HostModel("m", state, **more)


def status(*, spec: ModelSpec | None = SPEC, groups: Any = (), hosts: Any = ()) -> ModelStatus:
    return statuses({"m": spec}, groups, hosts, NOW)["m"]


def test_nothing_is_known_of_a_model_that_nobody_has() -> None:
    assert status() == status(spec=None) == ModelStatus()
    assert status(groups=[group("ready", model="other")], hosts=[host(HostModel("other", "failed"))]).state == (
        "unloaded"
    )


def test_groups_that_take_requests_are_replicas() -> None:
    groups = [group("busy", name="h2/m", memory=7), group("ready"), group("starting", name="h3/m")]
    found = status(groups=groups, hosts=[host(said("failed", error="E"), name="h4")])
    assert (found.state, found.replicas, found.hosts, found.memory) == ("loaded", 2, ["h1", "h2"], 7)
    assert found.ready
    assert found.expected_seconds == 0


def test_what_caches_may_grow_to_is_told_beside_the_weights() -> None:
    groups = [group("ready", memory=9_000, kv_bytes=8_000), group("busy", name="h2/m", memory=5, kv_bytes=2)]
    found = status(groups=groups)
    assert (found.memory, found.kv_bytes) == (9_000, 8_000)


@pytest.mark.parametrize("state", ["starting", "hung"])
def test_a_group_on_its_way_is_loading_as_far_as_it_or_its_host_says(state: str) -> None:
    hosts = [host(said("loading", done=1, total=4, memory=9, load_seconds=8.0))]
    found = status(groups=[group(state, loaded=0.5, message="It reads.")], hosts=hosts)
    assert (found.state, found.progress, found.done, found.total) == ("loading", 0.5, 1, 4)
    assert (found.memory, found.reason, found.expected_seconds) == (9, "It reads.", 4.0)
    assert status(hosts=hosts).progress == 0.25


def test_a_download_tells_its_bytes() -> None:
    found = status(hosts=[host(said("downloading", done=3, total=4)), host(said("downloading"), name="h2")])
    assert (found.state, found.progress, found.done, found.total) == ("downloading", 0.75, 3, 4)
    assert found.hosts == ["h1", "h2"]


def test_a_model_that_sleeps_somewhere_has_not_failed_elsewhere() -> None:
    hosts = [host(said("failed", failed_at=NOW)), host(said("sleeping", load_seconds=2.0), name="h2")]
    found = status(hosts=hosts)
    assert (found.state, found.hosts, found.expected_seconds) == ("sleeping", ["h2"], 2.0)


def test_the_last_failure_is_told_until_it_is_asked_for_again() -> None:
    hosts = [
        host(said("failed", failed_at=NOW - 9, error="Old.")),
        host(said("failed", failed_at=NOW - 5, error="No memory."), name="h2"),
        host(said("failed", failed_at=NOW, error="Gone."), name="h3", state="gone"),
    ]
    found = status(hosts=hosts)
    assert (found.state, found.reason, found.hosts) == ("failed", "No memory.", ["h1", "h2"])
    assert found.failed_at == NOW - 5
    asked = ModelSpec("m", "hub/m", action="load", action_at=NOW - 1)
    assert status(spec=asked, hosts=hosts).state == "loading"
    late = ModelSpec("m", "hub/m", action="load", action_at=NOW - JUST_ASKED)
    assert status(spec=late).state == "unloaded"


def test_why_a_model_is_not_loaded() -> None:
    unloaded = ModelSpec("m", "hub/m", action="unload", action_at=NOW)
    assert "unloaded on demand" in status(spec=unloaded).reason
    draining = status(spec=unloaded, groups=[group("draining")])
    assert (draining.state, draining.reason) == ("unloaded", "Its last group is finishing its requests.")
    assert status(groups=[group("gone")]).reason == ""


group_states = st.sampled_from(["starting", "ready", "busy", "hung", "draining", "gone"])
host_states = st.sampled_from(["downloading", "loading", "sleeping", "failed", "stored"])


@given(
    st.lists(st.tuples(st.sampled_from("mn"), group_states, st.floats(0, 1)), max_size=5),
    st.lists(st.tuples(st.sampled_from("mn"), host_states, st.integers(0, 9), st.integers(0, 9)), max_size=5),
)
def test_all_at_once_are_each_alone_and_shares_are_shares(groups: Any, hosts: Any) -> None:
    records = [
        group(state, name=f"h{index}/x", model=model, loaded=loaded)
        for index, (model, state, loaded) in enumerate(groups)
    ]
    told = [
        host(HostModel(model, state, done, total, load_seconds=3.0), name=f"h{index}")
        for index, (model, state, done, total) in enumerate(hosts)
    ]
    specs = {"m": SPEC, "n": None}
    found = statuses(specs, records, told, NOW)
    assert found == {name: statuses({name: spec}, records, told, NOW)[name] for name, spec in specs.items()}
    for one in found.values():
        assert 0 <= one.progress <= 1
        assert 0 <= one.expected_seconds <= 3
        assert one.ready == (one.state == "loaded") == (one.replicas > 0)
