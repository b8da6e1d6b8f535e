"""What `ryzanstein status` shows of groups."""

import os
from typing import Any

import pytest
from rich.console import Console

from services.cli.commands.status import ServiceStatus, print_status, snapshot
from services.cli.target import StartedProcess
from shared.messages import (
    GroupLoad,
    GroupRecord,
    GroupTraits,
    HostBeat,
    HostModel,
    HostRecord,
    RankBeat,
    ServiceRecord,
    StreamedWeights,
)
from shared.process import pid_namespace


def shown(record: GroupRecord) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        print_status(snapshot([], [record]), console)
    return capture.get()


def test_a_slow_group_is_shown_with_its_speed() -> None:
    record = GroupRecord("g[1]", "m", "ready", 1, [], GroupLoad(2, 3, 0, 1, 4))
    assert "speed" not in shown(record)
    assert "g[1]" in shown(record)
    slow = GroupRecord("g", "m", "ready", 1, [], GroupLoad(), weight=0.25)
    assert "ready (speed 25%)" in shown(slow)


def test_only_processes_that_can_be_seen_from_here_have_figures() -> None:
    """A container's process ids are those of other processes outside."""
    here, elsewhere = (
        ServiceRecord("executor", name, os.getpid(), "ready", pid_namespace=space)
        for name, space in (("here", pid_namespace()), ("elsewhere", "another boot/1"))
    )
    ranks = [RankBeat(0, os.getpid(), 5, 0, False)]
    groups = [
        GroupRecord(f"of-{record.instance}", "m", "ready", 1, ranks, GroupLoad(), instance=record.instance)
        for record in (here, elsewhere)
    ]
    console = Console(width=100)
    with console.capture() as capture:
        print_status(snapshot([here, elsewhere], groups), console)
    lines = capture.get().splitlines()
    assert ["MiB" in line for line in lines if str(os.getpid()) in line] == [False, True, False, True]


def test_versions_are_shown_while_there_are_several() -> None:
    """As during a rolling update; programs see them always."""
    services = [ServiceRecord("gateway", f"gateway-{n}", n + 1, "ready", version=f"0.{n}.0") for n in range(3)]
    texts = []
    starting = ServiceRecord("scheduler", "scheduler-0", 9, "ready")
    for some in ([services[0], starting], services[:2], services):
        console = Console(width=100)
        with console.capture() as capture:
            print_status(snapshot(some, []), console)
        texts.append(capture.get())
    assert "version" not in texts[0]
    assert "version" in texts[1]
    assert [word for word in texts[1].split() if word.startswith("0.")] == ["0.0.0", "0.1.0"]
    assert [one.version for one in snapshot(services[:2], []).status.services] == ["0.0.0", "0.1.0"]
    assert "side by side" not in texts[1], "neighbours may"
    assert "0.0.0 and 0.2.0 run side by side" in texts[2]


def test_how_far_the_cache_can_grow_is_shown() -> None:
    assert "270 MB" in shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), kv_bytes=270_000_000))
    assert "12.3 GB" in shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), kv_bytes=12_345_678_900))


def test_what_computes_is_shown() -> None:
    ranks = [RankBeat(0, 1, 5, 0, False)]
    assert "native avx2" in shown(GroupRecord("g", "m", "ready", 1, ranks, GroupLoad(), kernels="native avx2"))


def test_weights_that_are_read_in_each_step_are_shown() -> None:
    weights = StreamedWeights(2_000_000_000, 500_000_000, 1_000_000_000.0)
    assert weights.of_ranks(2) == StreamedWeights(4_000_000_000, 1_000_000_000, 2_000_000_000.0)
    assert (
        "g: 2,000 MB in memory, 500 MB of others are read for each step; 1,000 MB/s from disk allow 2 tokens/s to one "
        "sequence"
    ) in shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), streamed=weights))
    unmeasured = StreamedWeights(2_000_000_000, 500_000_000, 0.0)
    assert unmeasured.tokens_per_second == 0
    assert "are read for each step\n" in shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), streamed=unmeasured))


@pytest.mark.parametrize(
    ("traits", "line"),
    [
        (GroupTraits(["pages", "window"]), "g: computes sparse attention by pages and window"),
        (GroupTraits(draft_model="small"), "g: draft model: small"),
        (
            GroupTraits(["window"], "small", "There is no room."),
            "g: served without the draft model small: There is no room.",
        ),
        (GroupTraits(), ""),
        (None, ""),
    ],
)
def test_what_groups_differ_in_is_shown(traits: GroupTraits | None, line: str) -> None:
    found = shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), traits=traits))
    assert line in found
    assert bool(line) is ("g: " in found)


def test_how_far_a_start_has_come_is_shown() -> None:
    def record(**more: Any) -> GroupRecord:
        return GroupRecord("g", "m", **({"state": "starting", "epoch": 1, "ranks": [], "load": GroupLoad()} | more))

    assert "g: its ranks are started" in shown(record())
    assert "g: 40% of its weights are read\n" in shown(record(loaded=0.4))
    assert "g: 100% of its weights are read; it gets ready" in shown(record(loaded=1.0))
    assert "g: waits for its host" in shown(record(loaded=0.4, message="waits for its host"))
    assert "g: no progress for 3 s" in shown(record(state="hung", message="no progress for 3 s"))
    assert "g:" not in shown(record(state="ready", loaded=1.0, message="what was before"))


def test_what_has_not_been_heard_yet_is_starting_and_an_earlier_stacks_records_are_not_shown() -> None:
    started = [StartedProcess("gateway", "gateway-0", 12), StartedProcess("executor", "executor-0", 13)]
    known = [ServiceRecord("gateway", "gateway-0", 12, "ready"), ServiceRecord("executor", "executor-0", 7, "ready")]
    groups = [GroupRecord("group-0", "old", "ready", 1, [], GroupLoad(), instance="executor-0")]
    found = snapshot(known, groups, started).status
    assert found.services == [
        ServiceStatus("executor", "executor-0", 13, "starting"),
        ServiceStatus("gateway", "gateway-0", 12, "ready"),
    ]
    assert found.groups == []
    assert len(snapshot(known, groups).status.groups) == 1


def test_a_host_is_shown_with_its_groups_and_what_it_says_of_models() -> None:
    models = [
        HostModel("slow", "loading", done=1, total=4),
        HostModel("wanted", "downloading"),
        HostModel("broken", "failed", error="There is no such file."),
        HostModel("dozing", "sleeping"),
        HostModel("there", "stored"),
    ]
    takes = HostBeat(memory=20_000_000_000, used=5_000_000_000, models=models, takes_models=True)
    hosts = [
        HostRecord("host-0", takes, "ready"),
        HostRecord("host-1", HostBeat(), "ready"),
        HostRecord("host-2", takes, "gone"),
    ]
    groups = [GroupRecord(name, name, "ready", 1, [], GroupLoad(), instance="host-0") for name in ("one", "two")]
    found = snapshot([], groups, (), hosts)
    assert [host.instance for host in found.status.hosts] == ["host-0"]
    console = Console(width=100)
    with console.capture() as capture:
        print_status(found, console)
    text = capture.get()
    assert all(part in text for part in ("one", "two", "20.0 GB", "5,000 MB", "dozing"))
    assert "host-0: slow is loading, 25%" in text
    assert "host-0: wanted is downloading\n" in text
    assert "host-0: broken has failed: There is no such file." in text
    assert "there" not in text.replace("There", "")
