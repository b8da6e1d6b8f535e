"""When nothing more is to be expected of an engine that has something to compute."""

import pytest

from services.executor.engines.leader import stands_still
from services.executor.leader.group_leader import LOOP_BEAT


@pytest.mark.parametrize(
    ("quiet", "stopped", "looks", "still"),
    [
        (0.0, True, 0, False),
        (LOOP_BEAT / 2, True, 0, False),
        (LOOP_BEAT, True, 1, True),
        (LOOP_BEAT, False, 1, False),
        (60.0, False, 0, True),
    ],
)
def test_its_processes_are_looked_at_where_it_has_told_nothing(
    quiet: float, stopped: bool, looks: int, still: bool
) -> None:
    asked: list[float] = []

    def is_stopped() -> bool:
        asked.append(quiet)
        return stopped

    assert stands_still(quiet, 60.0, is_stopped) == still
    assert len(asked) == looks
