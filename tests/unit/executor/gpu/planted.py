"""Plants wrong changes in the GPU's code, one at a time, and prints which tests find each.

    python -m tests.unit.executor.gpu.planted [-k WORDS] [--tests PATH ...] [--slow] [-x]

The list is `planted.txt`. Each bug is looked for by the tests that it names, or by `--tests`; ends with 1 where one
is found by none. A test that finds nothing which others do not find is worth little: look here before you write one,
and plant a bug here with each new kernel. Takes minutes, and is part of no suite.

Tests are collected once. Each bug has a fork of that process, in which the functions of its module get the code of a
changed copy of it, wherever they are referred to.
"""

import argparse
import functools
import os
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent.relative_to(ROOT)
SOURCES = Path("services/executor/gpu")


class Bug(NamedTuple):
    about: str
    file: Path
    tests: list[str]
    old: str
    new: str

    def plant(self) -> None:
        """In this process."""
        text = (ROOT / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.file} has changed, and holds no {self.old!r}, or several"
        copy = Path(tempfile.mkdtemp(), self.file.name)  # where Triton's interpreter looks for a kernel's lines
        copy.write_text(text.replace(self.old, self.new))
        module = sys.modules[".".join(self.file.with_suffix("").parts)]
        changed = types.ModuleType(module.__name__)
        changed.__dict__.update(__package__=module.__package__, __file__=module.__file__)
        sys.modules[module.__name__] = changed  # for dataclasses
        exec(compile(copy.read_text(), str(copy), "exec"), changed.__dict__)
        sys.modules[module.__name__] = module
        for name, made in vars(changed).items():
            if getattr(made, "__module__", None) == module.__name__ or hasattr(made, "rewriter"):
                replace(getattr(module, name), made)


def replace(old: Any, new: Any) -> None:
    """Has `old` do what `new` does."""
    if hasattr(old, "rewriter"):  # a kernel
        old.fn, old.rewriter = new.fn, new.rewriter
    elif isinstance(old, type):
        for name, made in vars(new).items():
            replace(vars(old).get(name), made)
    elif isinstance(old, property):
        replace(old.fget, new.fget)
    elif isinstance(old, functools.cached_property | classmethod | staticmethod):
        replace(getattr(old, "func", None) or old.__func__, getattr(new, "func", None) or new.__func__)
    elif hasattr(old, "__wrapped__"):
        replace(old.__wrapped__, new.__wrapped__)
    elif isinstance(old, types.FunctionType):
        old.__code__ = new.__code__


def bugs() -> Iterator[Bug]:
    lines = Path(__file__).with_suffix(".txt").read_text().replace("\\n", "\0").splitlines()[1:]
    for head, change in zip(lines[::2], lines[1::2], strict=True):
        about, file, tests = head.split(" | ")
        old, new = change.replace("\0", "\n").strip(" ").removesuffix(" =>").partition(" => ")[::2]
        yield Bug(
            about, Path(os.path.normpath(SOURCES / file)), [f"{HERE / test}.py" for test in tests.split()], old, new
        )


class Planting:
    """A plugin of pytest's, which runs the tests for each bug in place of running them once."""

    def __init__(self, chosen: list[Bug], given: argparse.Namespace) -> None:
        self._bugs, self._given = chosen, given
        self._out = os.dup(1)
        self._failed: list[str] = []
        self.missed = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for bug in self._bugs:
            tests = tuple(self._given.tests or bug.tests)
            found = self._look_for(bug, [item for item in session.items if item.nodeid.startswith(tests)])
            self.missed += not found
            places = Counter(name.removeprefix(f"{HERE}/").split("[")[0] for name in found)
            where = ", ".join(f"{place} ({count})" for place, count in places.items()) or "NOBODY"
            os.write(self._out, f"| {bug.file.relative_to(SOURCES.parent)} | {bug.about} | {where} |\n".encode())
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)

    def _plant(self, bug: Bug) -> None:
        """Ends the process, with nothing found, where the source has changed too much for it."""
        try:
            bug.plant()
        except Exception as error:
            os.write(self._out, f"{bug.about}: cannot be planted, {error!r}\n".encode())
            os._exit(0)

    def _look_for(self, bug: Bug, items: list[pytest.Item]) -> list[str]:
        """Which of `items` fail."""
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                self._plant(bug)
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if self._given.x and self._failed:
                        break
            except BaseException as error:
                self._failed = [f"an error: {error!r}"]
            os.write(writing, "\n".join(self._failed).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            found = told.read().splitlines()
        _, status = os.waitpid(child, 0)
        return found or ["a crash"] * (status != 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only bugs with these words")
    parser.add_argument("--tests", nargs="+", help="in place of those that the list names")
    parser.add_argument("--slow", action="store_true", help="slow and nightly tests too")
    parser.add_argument("-x", action="store_true", help="the first test that finds it will do")
    given = parser.parse_args()
    chosen = [bug for bug in bugs() if given.k in f"{bug.about} {bug.file}"]
    planting = Planting(chosen, given)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of pytest's own words nobody asks
    tests = given.tests or sorted({test for bug in chosen for test in bug.tests})
    marks = ["-m", ""] if given.slow else []
    code = pytest.main(["-pno:cacheprovider", *marks, *tests], [planting])
    return int(code or planting.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
