"""Losses as a picture of characters."""

from hypothesis import given
from hypothesis import strategies as st

from services.cli.commands.fine_tune.curve import Point, draw

VALUES = st.floats(-1e6, 1e6)
POINTS = st.lists(st.tuples(st.integers(0, 100_000), VALUES), max_size=60)


def test_a_falling_loss_falls() -> None:
    line = [(step, 4.0 - step / 10) for step in range(1, 21)]
    top, *middle, bottom, axis = draw(line, [(10, 3.0)], 30, 6)
    assert top.startswith("3.9 ┤")
    assert bottom.startswith("  2 ┤")
    assert axis.split() == ["step", "1", "20"]
    assert sum(row.count("o") for row in middle) == 1, "the one loss of validation"
    starts = [len(row) - len(row.lstrip("0123456789.│┤ ")) for row in (top, *middle, bottom)]
    assert starts == sorted(starts), "further down is further right"


def test_without_points_there_is_no_picture() -> None:
    assert draw([], [], 40, 8) == []


@given(line=POINTS, marks=POINTS, width=st.integers(1, 120), height=st.integers(1, 20))
def test_a_picture_keeps_its_size(line: list[Point], marks: list[Point], width: int, height: int) -> None:
    rows = draw(line, marks, width, height)
    assert len(rows) == (height + 1 if line or marks else 0)
    assert all(len(row) <= max(width, 16) for row in rows[:-1])


@given(line=POINTS.filter(bool))
def test_every_point_has_its_dot(line: list[Point]) -> None:
    """At least one dot a column of cells that has points, none in a column without, but for lines between them."""
    drawn = "".join(draw(line, [], 60, 4)[:-1])
    assert any(0x2800 < ord(one) <= 0x28FF for one in drawn)
