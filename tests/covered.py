"""Coverage is measured of one part of the project in turn, by that part's own fast tests and those it names: tracing
makes Python less than half as fast. While another test runs neither its process nor those that it starts are traced.

python -m tests.covered PART     its files, as `coverage report --include` takes them
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

# Where it is set, coverage measures each process that starts (its patch "subprocess").
CONFIG = "COVERAGE_PROCESS_CONFIG"
# Names the part; `turn`: the one whose turn it is, by the number of commits; empty: all fast tests are traced.
CHOSEN = "COVERED_PART"


class Part(NamedTuple):
    tests: tuple[str, ...]
    files: tuple[str, ...]
    also: tuple[str, ...] = ()  # slow ones and another part's that alone run some of its files


PARTS = {
    "executor": Part(
        ("tests/unit/executor/", "tests/integration/executor/"),
        ("services/executor/*",),
        ("tests/integration/executor/test_host_trainings.py", "tests/integration/executor/test_trainings.py"),
    ),
    "gateway": Part(("tests/unit/gateway/", "tests/integration/gateway/"), ("services/gateway/*",)),
    "others": Part(
        ("tests/",),
        ("services/cli/*", "services/health_monitor/*", "services/scheduler/*", "shared/*", "clients/python/src/*"),
        (
            "tests/e2e/test_command_line.py",
            "tests/e2e/test_local_stack.py",
            "tests/integration/gateway/server/test_tls.py",
        ),
    ),
}


def part_of(nodeid: str) -> str:
    """The first whose tests it is among."""
    return next((name for name, part in PARTS.items() if nodeid.startswith(part.tests)), "others")


class Traced:
    """A plugin of each process that runs tests."""

    def __init__(self, chosen: str) -> None:
        """`chosen`: as CHOSEN has it."""
        self._chosen = named(chosen)

    def _is_traced(self, item: pytest.Item) -> bool:
        if self._chosen and item.nodeid.startswith(PARTS[self._chosen].also):
            return True
        if item.get_closest_marker("slow") or item.get_closest_marker("nightly"):
            return False
        return not self._chosen or part_of(item.nodeid) == self._chosen

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        config = os.environ.get(CONFIG)
        if config is None or self._is_traced(item):
            yield
            return
        # Not by coverage's own stop and start, which make a tracer each time and keep all of them.
        here, in_threads = sys.gettrace(), threading.gettrace()
        del os.environ[CONFIG]
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        try:
            yield
        finally:
            os.environ[CONFIG] = config
            threading.settrace(in_threads)  # type: ignore[arg-type]
            sys.settrace(here)


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


def named(chosen: str) -> str:
    """`chosen`, where that is `turn` the part whose turn it is."""
    if chosen != "turn":
        return chosen
    counted = subprocess.run(["git", "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=False)
    return list(PARTS)[int(counted.stdout or 0) % len(PARTS)]


if __name__ == "__main__":
    print(",".join(PARTS[named(sys.argv[1])].files))
