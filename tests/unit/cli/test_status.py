"""What `ryzanstein status` shows of groups."""

import os

from rich.console import Console

from services.cli.status import print_status, snapshot
from shared.messages import GroupLoad, GroupRecord, RankBeat, ServiceRecord
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


def test_how_far_the_cache_can_grow_is_shown() -> None:
    assert "270 MB" in shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), kv_bytes=270_000_000))
    assert "12.3 GB" in shown(GroupRecord("g", "m", "ready", 1, [], GroupLoad(), kv_bytes=12_345_678_900))
