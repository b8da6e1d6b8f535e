"""How long each test takes, with what it sets up: the slowest are shown at the end of a run. What a whole lane took,
that of `make test` or of the slow tests, is kept until the lane runs again.

`python -m tests.durations [--depth 3] [--slowest 30] [--lane slow]` tells where the time of the last runs went, by
folder and by test.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / "build" / "durations.json"
SLOWEST = 30
FAST, SLOW, NIGHTLY = LANES = ("fast", "slow", "nightly")

Seconds = Mapping[str, float]  # of each test, by its name


class Durations:
    """A plugin of whoever collects the reports: with several processes, the one that the others report to."""

    def __init__(self, kept: Path = KEPT, *, whole: bool = True) -> None:
        """`whole`: all tests of a lane were asked for. A part of one is shown, not kept."""
        self._kept = kept
        self._whole = whole
        self._lanes: dict[str, defaultdict[str, float]] = {lane: defaultdict(float) for lane in LANES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lane = next((each for each in (NIGHTLY, SLOW) if each in report.keywords), FAST)
        self._lanes[lane][report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        seconds = {name: each for lane in self._lanes.values() for name, each in lane.items()}
        if len(seconds) <= SLOWEST:
            return
        if self._whole:
            self._keep()
        terminalreporter.section(f"slowest {SLOWEST} of {len(seconds)} tests")
        for line in slowest(seconds, SLOWEST):
            terminalreporter.write_line(line)

    def _keep(self) -> None:
        """The lanes that have run; the other stays as it is."""
        ran = {
            lane: {name: round(each, 2) for name, each in sorted_by(seconds)}
            for lane, seconds in self._lanes.items()
            if seconds
        }
        self._kept.parent.mkdir(exist_ok=True)
        self._kept.write_text(json.dumps(kept(self._kept) | ran))


def is_whole(config: pytest.Config) -> bool:
    """Whether a run was asked for all tests of its lanes, not for some of them by path, name or failure."""
    chosen = config.getoption("keyword", "") or config.getoption("lf", False)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


def kept(file: Path) -> dict[str, Seconds]:
    """By lane; empty where nothing has been kept."""
    found: dict[str, Seconds] = json.loads(file.read_text()) if file.exists() else {}
    return {lane: found[lane] for lane in LANES if lane in found}


def sorted_by(seconds: Seconds) -> list[tuple[str, float]]:
    """Longest first."""
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))


def slowest(seconds: Seconds, count: int) -> list[str]:
    """A line each."""
    return [f"{each:8.1f} s  {name}" for name, each in sorted_by(seconds)[:count]]


def by_folder(seconds: Seconds, depth: int) -> list[str]:
    """A line for each folder, or file, `depth` levels down: seconds, tests, its name."""
    sums: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, int] = defaultdict(int)
    for name, each in seconds.items():
        folder = "/".join(name.partition("::")[0].split("/")[:depth])
        sums[folder] += each
        tests[folder] += 1
    return [f"{each:8.1f} s {tests[name]:6}  {name}" for name, each in sorted_by(sums)]


def table(lanes: Mapping[str, Seconds], depth: int, count: int) -> Iterator[str]:
    """What is told of each lane."""
    for lane, seconds in lanes.items():
        yield f"{sum(seconds.values()):8.1f} s {len(seconds):6}  {lane} tests, one after the other"
        yield from by_folder(seconds, depth)
        yield ""
        yield from slowest(seconds, count)
        yield ""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("--depth", type=int, default=3, help="folders below the root that are told apart (3)")
    parser.add_argument("--slowest", type=int, default=SLOWEST, help=f"tests that are listed ({SLOWEST})")
    parser.add_argument("--lane", choices=LANES, help="of one lane only")
    parser.add_argument("file", type=Path, nargs="?", default=KEPT, help="the kept durations (build/durations.json)")
    asked = parser.parse_args()
    lanes = {lane: seconds for lane, seconds in kept(asked.file).items() if asked.lane in (None, lane)}
    if not lanes:
        parser.error(f"{asked.file} holds none; run `make test`, or `make test-slow` for the slow lane.")
    print(*table(lanes, asked.depth, asked.slowest), sep="\n")


if __name__ == "__main__":
    main()
