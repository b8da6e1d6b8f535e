"""Hung or busy, by the board's counters; a ring that stands still while it loads."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import Loading, RingBoard
from services.executor.supervisor import group
from services.executor.supervisor.failure_detection import LoadWatch, RingWatch
from services.executor.supervisor.service import ExecutorService
from shared.config import load_settings
from shared.messages import RankBeat

LIMIT = 3.0


def rank(number: int = 0, *, step: int = 5, progress: int = 0, in_flight: bool = True) -> RankBeat:
    return RankBeat(number, 100 + number, step, progress, in_flight)


def test_a_rank_without_progress_is_hung_and_named() -> None:
    watch = RingWatch(LIMIT)
    for tick in range(6):
        now = tick / 2
        ranks = [rank(0, progress=tick), rank(1, progress=7)]
        assert watch.verdict(1, tick, ranks, now) == ""
    reason = watch.verdict(1, 6, [rank(0, progress=6), rank(1, progress=7)], 3.0)
    assert reason == "rank 1 (process 101) is hung in step 6"


def test_a_leader_that_is_stopped_is_hung_without_work_too() -> None:
    watch = RingWatch(LIMIT)
    idle = [rank(in_flight=False)]
    assert watch.verdict(1, 9, idle, 0.0) == ""
    assert watch.verdict(1, 9, idle, 2.9) == ""
    assert watch.verdict(1, 9, idle, 3.0) == "the leader has stood still"


def test_a_starved_event_loop_beside_a_long_step_is_busy() -> None:
    """Layers advance for a minute, and the loop gets no turn."""
    watch = RingWatch(LIMIT)
    for tick in range(120):
        assert watch.verdict(1, 9, [rank(progress=tick)], tick / 2) == ""


def test_a_long_prefill_is_busy_while_its_layers_advance() -> None:
    """A layer takes two seconds, the step a minute."""
    watch = RingWatch(LIMIT)
    for tick in range(120):
        ranks = [rank(number, progress=tick // 4) for number in range(2)]
        assert watch.verdict(1, tick, ranks, tick / 2) == ""


def test_an_orchestrator_that_was_stopped_with_its_ring_blames_nobody() -> None:
    watch = RingWatch(LIMIT)
    assert watch.verdict(1, 9, [rank()], 0.0) == ""
    assert watch.verdict(1, 9, [rank()], 60.0) == ""
    assert watch.verdict(1, 9, [rank()], 62.9) == ""
    assert watch.verdict(1, 9, [rank()], 63.0), "now it has been seen to stand still"


def test_the_next_ring_begins_anew() -> None:
    watch = RingWatch(LIMIT)
    watch.verdict(1, 9, [rank()], 0.0)
    assert watch.verdict(2, 9, [rank()], 3.0) == ""


@given(st.lists(st.tuples(st.floats(0.01, 20.0), st.integers(1, 5)), max_size=40), st.integers(1, 4))
def test_whoever_moves_is_never_hung_however_seldom_we_look(looks: list[tuple[float, int]], ranks: int) -> None:
    """Our own loop may be starved as well."""
    watch, now, progress = RingWatch(LIMIT), 0.0, 0
    for gap, moved in looks:
        now += gap
        progress += moved
        assert watch.verdict(1, 0, [rank(number, progress=progress) for number in range(ranks)], now) == ""


def test_a_rank_that_reads_no_more_of_its_weights_is_named() -> None:
    watch = LoadWatch(LIMIT)
    for tick in range(6):
        ranks = [Loading(0, 100, tick, 10), Loading(1, 101, 4, 10)]
        assert watch.verdict(1, ranks, tick / 2) == ""
    reason = watch.verdict(1, [Loading(0, 100, 6, 10), Loading(1, 101, 4, 10)], 3.0)
    assert reason.startswith("rank 1 (process 101) has read nothing for 3 s, after 40% of its weights")


def test_before_and_behind_the_reading_nobody_is_judged() -> None:
    """A download may take as long as it takes, and so may kernels that are compiled."""
    watch = LoadWatch(LIMIT)
    for tick in range(60):
        assert watch.verdict(1, [Loading(0, 100, 0, 0), Loading(1, 101, 10, 10)], tick / 2) == ""


def test_an_orchestrator_that_was_stopped_blames_no_rank_that_loads() -> None:
    watch = LoadWatch(LIMIT)
    assert watch.verdict(1, [Loading(0, 100, 4, 10)], 0.0) == ""
    assert watch.verdict(1, [Loading(0, 100, 4, 10)], 60.0) == ""
    assert watch.verdict(2, [Loading(0, 100, 4, 10)], 62.0) == "", "the next ring begins anew"


def test_the_board_says_what_each_rank_has_read(tmp_path: Path) -> None:
    board = RingBoard(tmp_path / "board", 2, create=True)
    assert board.loading() == []
    rank = board.rank(1)
    rank.loaded(3, 8)
    [found] = board.loading()
    assert found._replace(pid=0) == Loading(1, 0, 3, 8)


async def test_a_ring_is_lost_with_the_rank_that_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LoadWatch", lambda: LoadWatch(limit=0.5))
    board = RingBoard(tmp_path / "board", 1, create=True)
    board.rank(0).loaded(1, 4)
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ring: Any = SimpleNamespace(epoch=1, ready=asyncio.Event(), board=board, lose=lost.set_result)
    settings = load_settings(ExecutorSettings, engine="stub", hung_after=1.0)
    supervisor = group.GroupSupervisor(settings, "g", ExecutorService(settings))
    supervisor._ring = ring
    watching = asyncio.create_task(supervisor._watch_progress())
    try:
        async with asyncio.timeout(30):
            assert "has read nothing for 0.5 s, after 25% of its weights" in await lost
    finally:
        watching.cancel()
