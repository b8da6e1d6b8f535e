"""Coverage is measured of the fast tests alone: tracing makes lines cost twice as much, and what a slow test runs is a
variant of what a fast one does. While a slow test runs neither its process nor those that it starts are traced.
"""

import os
import sys
from collections.abc import Iterator

import pytest

CONFIG = "COVERAGE_PROCESS_CONFIG"
"""Where it is set, coverage measures each process that starts (its patch "subprocess")."""


class FastAlone:
    """A plugin of each process that runs tests."""

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        config = os.environ.get(CONFIG)
        if config is None or item.get_closest_marker("slow") is None:
            yield
            return
        from coverage import Coverage

        measured = Coverage.current()
        del os.environ[CONFIG]
        if measured is not None:
            measured.stop()
        try:
            yield
        finally:
            os.environ[CONFIG] = config
            if measured is not None:
                measured.start()


def follow_environment() -> None:
    """In a fork of a server that the first test has started, which need not be of the same kind: measured or not, as
    the environment says."""
    wanted = CONFIG in os.environ
    if not wanted and "coverage" not in sys.modules:
        return
    from coverage import Coverage, process_startup

    measured = Coverage.current()
    if wanted and measured is None:
        process_startup()
    elif measured is not None and not wanted:
        measured.stop()
