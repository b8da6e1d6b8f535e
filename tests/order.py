"""Where the longest tests stand among those of a run: first, so that none of them is still running, alone on its core,
when all others have ended.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

LONG = 600.0
"""Seconds after which a test that may take as long is stopped, at least: its marker `timeout` says so."""
Test = TypeVar("Test")


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
    items[:] = longest_first(items, is_long, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
