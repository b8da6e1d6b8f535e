"""In which order tests run: the longest first, so that none of them is still running, alone on its core, when all
others have ended; those of one stack of the real model one after the other, so that no second worker starts it too.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

# Seconds after which a test that may take as long is stopped, at least: its marker `timeout` says so.
LONG = 600.0
STACKS = frozenset({"two_groups", "one_ring_of_two"})  # fixtures of `tests/e2e` that take 20 s to begin
Test = TypeVar("Test")


def has_stack(item: pytest.Item) -> bool:
    names = {*getattr(item, "fixturenames", ())}
    if callspec := getattr(item, "callspec", None):
        names |= {value for value in callspec.params.values() if isinstance(value, str)}
    return bool(names & STACKS)


def together(tests: Sequence[Test], belongs: Callable[[Test], bool]) -> list[Test]:
    """The same tests: those that belong together follow the first of them."""
    first = next((place for place, test in enumerate(tests) if belongs(test)), len(tests))
    rest = tests[first:]
    return [*tests[:first], *filter(belongs, rest), *(test for test in rest if not belongs(test))]


def is_long(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("timeout")
    return marker is not None and marker.args[0] >= LONG


def longest_first(tests: Sequence[Test], is_long: Callable[[Test], bool], workers: int) -> list[Test]:
    """The same tests. pytest-xdist gives each of `workers` its share in one piece of equal length: each piece begins
    with some of the long ones."""
    long = [test for test in tests if is_long(test)]
    others = [test for test in tests if not is_long(test)]
    ordered: list[Test] = []
    for worker in range(workers):
        own = long[worker::workers]
        share = max(0, (len(tests) - len(ordered)) // (workers - worker) - len(own))
        ordered += own + others[:share]
        del others[:share]
    return ordered


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is not selected has gone by now."""
    items[:] = longest_first(together(items, has_stack), is_long, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
