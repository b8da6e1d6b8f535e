"""From the ranges of a profile to a table of operators. Pure.

    thread   |---- compute ----------------|     total of compute: the whole; self: without what is inside
               |-- mm --|   |- softmax -|

torch has such a table too, which takes a hundred times as long to make, while the rank serves.
"""

from collections.abc import Iterable
from typing import NamedTuple

from shared.messages.debugging import OperatorTime


class Range(NamedTuple):
    """Something that took its time; nanoseconds."""

    name: str
    start: int
    end: int
    thread: int
    on_device: bool = False


class _Row:
    def __init__(self) -> None:
        self.calls = self.own = self.total = self.device = 0


def operator_table(ranges: Iterable[Range], most: int) -> list[OperatorTime]:
    """The `most` operators with the most time by themselves; on a device where there is one.

    Ranges of a thread lie within each other or apart; those on a device are all counted as they are.
    """
    rows: dict[str, _Row] = {}
    open_: dict[int, list[Range]] = {}
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        row = rows.setdefault(one.name, _Row())
        row.calls += 1
        took = one.end - one.start
        if one.on_device:
            row.device += took
            continue
        row.own += took
        stack = open_.setdefault(one.thread, [])
        while stack and stack[-1].end <= one.start:
            stack.pop()
        if stack:
            rows[stack[-1].name].own -= took
        if all(outer.name != one.name for outer in stack):  # one within itself counts once
            row.total += took
        stack.append(one)
    found = [
        OperatorTime(name, row.calls, row.own / 1e3, row.total / 1e3, row.device / 1e3)
        for name, row in rows.items()
    ]
    found.sort(key=lambda row: (-(row.device_us or 0.0), -row.self_us, row.name))
    return found[:most]
