"""How long each test takes, with what it sets up: the slowest are shown at the end of a run, and all of them are kept.

`python -m tests.durations [--depth 3] [--slowest 30]` tells of the last run where its time went, by folder and by test.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / "build" / "durations.json"
SLOWEST = 30


class Durations:
    """A plugin of whoever collects the reports: with several processes, the one that the others report to."""

    def __init__(self, kept: Path = KEPT) -> None:
        self._kept = kept
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) > SLOWEST:
            self._kept.parent.mkdir(exist_ok=True)
            self._kept.write_text(
                json.dumps({name: round(each, 2) for name, each in sorted_by(self._seconds)})
            )
            terminalreporter.section(f"slowest {SLOWEST} of {len(self._seconds)} tests")
            for line in slowest(self._seconds, SLOWEST):
                terminalreporter.write_line(line)


def sorted_by(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Longest first."""
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))


def slowest(seconds: Mapping[str, float], count: int) -> list[str]:
    """A line each."""
    return [f"{each:8.1f} s  {name}" for name, each in sorted_by(seconds)[:count]]


def by_folder(seconds: Mapping[str, float], depth: int) -> list[str]:
    """A line for each folder, or file, `depth` levels down: seconds, tests, its name."""
    sums: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, int] = defaultdict(int)
    for name, each in seconds.items():
        folder = "/".join(name.partition("::")[0].split("/")[:depth])
        sums[folder] += each
        tests[folder] += 1
    return [f"{each:8.1f} s {tests[name]:6}  {name}" for name, each in sorted_by(sums)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("--depth", type=int, default=3, help="folders below the root that are told apart (3)")
    parser.add_argument("--slowest", type=int, default=SLOWEST, help=f"tests that are listed ({SLOWEST})")
    parser.add_argument(
        "file", type=Path, nargs="?", default=KEPT, help="the kept durations (build/durations.json)"
    )
    asked = parser.parse_args()
    try:
        seconds: dict[str, float] = json.loads(asked.file.read_text())
    except OSError:
        parser.error(f"There is no {asked.file}; run `make test` first, which writes it.")
    print(f"{sum(seconds.values()):8.1f} s {len(seconds):6}  in all, of one test after the other")
    print(*by_folder(seconds, asked.depth), "", *slowest(seconds, asked.slowest), sep="\n")


if __name__ == "__main__":
    main()
