"""Losses over steps as a picture of characters: each cell has 2 x 4 dots (Unicode's Braille patterns). Pure."""

from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]  # (step, value)

_BLANK = 0x2800
# Of a cell, row by row. Source: The Unicode Standard, chapter 21.1 "Braille".
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARK = "o"  # of points that are few, such as losses of validation


def draw(line: Sequence[Point], marks: Sequence[Point], width: int, height: int) -> list[str]:
    """`height` lines of at most `width` characters, and one below them that names the steps: `line` as dots joined with
    each other, its points that share a column as their mean, `marks` as single characters. Values stand at the left.
    Nothing where there is no point."""
    points = [*line, *marks]
    if not points:
        return []
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = [_label(high), _label(low)]
    margin = max(map(len, labels)) + 2
    canvas = _Canvas(max(1, width - margin), height, (first, last), (low, high))
    for one, other in pairwise(canvas.columns(line)):
        canvas.join(one, other)
    for column, row in canvas.columns(line):
        canvas.dot(column, row)
    for point in marks:
        canvas.mark(point)
    names = [labels[0], *[""] * (height - 2), labels[1]] if height > 1 else [labels[0]]
    rows = [f"{name:>{margin - 2}} {'┤' if name else '│'}{row}" for name, row in zip(names, canvas.rows(), strict=True)]
    return [row.rstrip() for row in (*rows, _axis(int(first), int(last), margin, canvas.width))]


def _label(value: float) -> str:
    return f"{value:.4g}"


def _axis(first: int, last: int, margin: int, width: int) -> str:
    left, right = f"step {first:,}", f"{last:,}"
    return " " * margin + (left if first == last else left + right.rjust(max(len(right) + 1, width - len(left))))


class _Canvas:
    def __init__(self, width: int, height: int, steps: Point, values: Point) -> None:
        self.width, self._height = width, height
        self._steps, self._values = steps, values
        self._cells = [[0] * width for _ in range(height)]
        self._marks: dict[tuple[int, int], str] = {}

    def columns(self, line: Sequence[Point]) -> list[tuple[int, int]]:
        """Dots (column, row) of `line`, one for each column that has points."""
        by_column: dict[int, list[float]] = {}
        for step, value in sorted(line):
            by_column.setdefault(self._column(step), []).append(value)
        return [(column, self._row(sum(values) / len(values))) for column, values in by_column.items()]

    def _column(self, step: float) -> int:
        return _scaled(step, self._steps, 2 * self.width - 1)

    def _row(self, value: float) -> int:
        dots = 4 * self._height - 1
        return dots - _scaled(value, self._values, dots)

    def dot(self, column: int, row: int) -> None:
        self._cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]

    def join(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]))
        for step in range(steps):
            share = step / steps
            self.dot(round(one[0] + share * (other[0] - one[0])), round(one[1] + share * (other[1] - one[1])))

    def mark(self, point: Point) -> None:
        self._marks[self._row(point[1]) // 4, self._column(point[0]) // 2] = _MARK

    def rows(self) -> list[str]:
        return [
            "".join(
                self._marks.get((row, column), chr(_BLANK + cell)) if cell or (row, column) in self._marks else " "
                for column, cell in enumerate(cells)
            )
            for row, cells in enumerate(self._cells)
        ]


def _scaled(value: float, within: Point, most: int) -> int:
    """`value` of `within` as a number from 0 to `most`."""
    low, high = within
    return round((value - low) / (high - low) * most) if high > low else 0
