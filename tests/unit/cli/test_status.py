"""What `ryzanstein status` shows of groups."""

from rich.console import Console

from services.cli.status import print_status, snapshot
from shared.messages import GroupLoad, GroupRecord


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
