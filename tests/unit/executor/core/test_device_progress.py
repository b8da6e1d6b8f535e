"""Progress is what the device has done: a kernel that hangs looks like one, a slow one does not."""

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.progress import NUMBERS, DeviceProgress
from services.executor.ipc.board import RankBoard, RingBoard
from services.executor.supervisor.failure_detection import RingWatch
from tests.unit.executor.gpu.fake_device import FakeDevice

LIMIT = 3.0
LAYERS = 8


class Rank:
    """One rank of a board, and its device."""

    def __init__(self, board: RingBoard, number: int) -> None:
        self.device = FakeDevice()
        self.board: RankBoard = board.rank(number)
        self.progress = self.board.follow_device(self.device)

    def launch(self, step: int) -> None:
        """All of a step, without waiting for it."""
        self.board.begin(step)
        for _ in range(LAYERS):
            self.board.progress.tick()
        self.board.launched(step)


@pytest.fixture
def board(tmp_path: Path) -> RingBoard:
    return RingBoard(tmp_path / "board", 2, create=True)


def verdicts(board: RingBoard, ranks: list[Rank], marks: list[int]) -> list[str]:
    """What the supervisor says, half a second apart, with `marks` passed by all devices in each."""
    watch = RingWatch(LIMIT)
    found = []
    for tick, count in enumerate(marks):
        for rank in ranks:
            rank.device.pass_marks(count)
            rank.progress.look()
        found.append(watch.verdict(1, tick, board.beats(), tick / 2))
    return found


def test_a_step_that_was_launched_is_in_flight_until_the_device_has_done_it(board: RingBoard) -> None:
    rank = Rank(board, 0)
    rank.launch(1)
    assert not rank.progress.look()
    assert [(beat.step, beat.progress, beat.in_flight) for beat in board.beats()] == [(0, 0, True)]
    rank.device.pass_marks(1)
    rank.progress.look()
    assert [(beat.step, beat.progress, beat.in_flight) for beat in board.beats()] == [(0, 1, True)]
    rank.device.pass_marks(9)
    assert rank.progress.look()
    assert [(beat.step, beat.progress, beat.in_flight) for beat in board.beats()] == [(1, 3, False)]


def test_a_step_whose_results_are_known_is_over_at_once(board: RingBoard) -> None:
    """The leader has read its tokens, so the device has done it, whatever was launched behind it."""
    rank = Rank(board, 0)
    rank.board.begin(1)
    rank.board.begin(2)
    rank.board.end(1)
    assert [(beat.step, beat.in_flight) for beat in board.beats()] == [(1, True)]
    rank.board.end(2)
    assert [(beat.step, beat.in_flight) for beat in board.beats()] == [(2, False)]


def test_a_device_that_hangs_makes_its_rank_hung_though_the_launches_went_on(board: RingBoard) -> None:
    ranks = [Rank(board, 0), Rank(board, 1)]
    for rank in ranks:
        rank.launch(1)
        rank.launch(2)
    found = verdicts(board, ranks, [3, 1, 0, 0, 0, 0, 0, 0])
    assert found[:7] == [""] * 7
    assert found[7].endswith("is hung in step 2")


def test_a_device_that_is_slow_is_busy(board: RingBoard) -> None:
    """A mark takes two seconds, the two steps twelve."""
    ranks = [Rank(board, 0), Rank(board, 1)]
    for rank in ranks:
        rank.launch(1)
        rank.launch(2)
    assert set(verdicts(board, ranks, [1, 0, 0, 0] * 6)) == {""}
    assert not any(beat.in_flight for beat in board.beats())


def test_only_the_device_behind_is_blamed(board: RingBoard) -> None:
    ranks = [Rank(board, 0), Rank(board, 1)]
    for rank in ranks:
        rank.launch(1)
    ranks[0].device.pass_marks(9)
    found = verdicts(board, ranks, [0] * 7)
    assert found[-1].startswith("rank 1 ")


def test_an_idle_device_is_not_hung(board: RingBoard) -> None:
    ranks = [Rank(board, 0), Rank(board, 1)]
    for rank in ranks:
        rank.launch(1)
    assert set(verdicts(board, ranks, [9] + [0] * 20)) == {""}


def test_nothing_is_marked_within_a_graph(board: RingBoard) -> None:
    rank = Rank(board, 0)
    rank.device.capturing = True
    for _ in range(LAYERS):
        rank.board.progress.tick()
    assert not rank.device.queued


def test_launches_that_are_far_ahead_mark_the_ends_of_steps_alone(board: RingBoard) -> None:
    rank = Rank(board, 0)
    for step in range(1, NUMBERS // 2):
        rank.launch(step)
    assert len(rank.device.queued) < NUMBERS
    rank.device.pass_marks(NUMBERS)
    rank.progress.look()
    assert [(beat.step, beat.in_flight) for beat in board.beats()] == [(NUMBERS // 2 - 1, False)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=200))
def test_marks_are_counted_beyond_their_numbers(script: list[tuple[int, int]]) -> None:
    device = FakeDevice()
    finished: list[int] = []
    words = (ctypes.c_int64 * 1)()
    progress = DeviceProgress(words, device, finished.append, ticks_per_mark=1)
    launched = passed = 0
    for launches, passes in script:
        for _ in range(min(launches, NUMBERS - 1 - len(device.queued))):
            launched += 1
            progress.end(launched)
        passed += min(passes, len(device.queued))
        device.pass_marks(passes)
        assert progress.look() == (passed == launched)
        assert progress.count == passed
        assert finished == list(range(1, passed + 1))


def test_it_looks_while_marks_are_outstanding() -> None:
    device = FakeDevice()
    finished: list[int] = []
    progress = DeviceProgress((ctypes.c_int64 * 1)(), device, finished.append)
    seen: list[list[int]] = []

    def pause(seconds: float) -> bool:
        seen.append(list(finished))
        if len(seen) == 3:
            progress.end(3)
        device.pass_marks(1)
        return len(seen) == 4

    progress.end(1)
    progress.end(2)
    progress.follow(pause)
    assert seen == [[], [1], [1, 2], [1, 2, 3]]


def test_a_device_that_is_lost_is_told_where_the_step_ends(board: RingBoard) -> None:
    class Lost(FakeDevice):
        def put(self, number: int) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    rank = board.rank(0)
    rank.follow_device(Lost())
    rank.begin(1)
    with pytest.raises(RuntimeError, match="launch failure"):
        rank.launched(1)
    assert [beat.in_flight for beat in board.beats()] == [True]
