"""Long tests are the first of each worker's share, those of one stack stand together, and none is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.order import longest_first, together


@given(long=st.lists(st.booleans(), max_size=40), workers=st.integers(1, 4))
def test_all_are_there_once_and_the_others_in_their_order(long: list[bool], workers: int) -> None:
    ordered = longest_first(range(len(long)), long.__getitem__, workers)
    assert sorted(ordered) == list(range(len(long)))
    others = [test for test in ordered if not long[test]]
    assert others == sorted(others)


@pytest.mark.parametrize(
    ("workers", "expected"), [(1, [5, 8, 9, 0, 1, 2, 3, 4, 6, 7]), (3, [5, 0, 1, 8, 2, 3, 9, 4, 6, 7])]
)
def test_each_worker_begins_with_some(workers: int, expected: list[int]) -> None:
    assert longest_first(range(10), {5, 8, 9}.__contains__, workers) == expected


def test_those_of_a_stack_follow_the_first_of_them() -> None:
    assert together(range(6), {1, 3, 5}.__contains__) == [0, 1, 3, 5, 2, 4]
    assert together(range(3), lambda test: False) == [0, 1, 2]
