"""What one check of `ryzanstein doctor` found, and how all of them are shown."""

import platform
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console

from services.cli.ui import print_columns, say
from shared.process import VERSION

# note: works, and could be faster; warning: something will fail that one may not use; error: serving fails
State = Literal["ok", "note", "warning", "error"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. The shape of an element of `ryzanstein doctor --json`."""

    name: str
    state: State
    found: str  # in a few words, with units
    advice: str = ""  # what to do, one sentence; empty where nothing is to be done


class DoctorReport(msgspec.Struct, frozen=True):
    """The shape of `ryzanstein doctor --json`; scripts rely on it."""

    version: str
    python: str
    platform: str
    checks: list[Check]

    @property
    def failed(self) -> bool:
        return any(check.state == "error" for check in self.checks)


def report_of(checks: Sequence[Check]) -> DoctorReport:
    """`checks` with what an issue report asks for beside them."""
    return DoctorReport(VERSION, platform.python_version(), platform.platform(), list(checks))


def show(report: DoctorReport, screen: Console) -> None:
    """A row for each check, and below them what to do, the most urgent first."""
    say(screen, f"ryzanstein {report.version}, Python {report.python} ({sys.executable}), {report.platform}\n")
    print_columns(screen, [("check", "state", "found"), *((one.name, one.state, one.found) for one in report.checks)])
    urgent = sorted((one for one in report.checks if one.advice), key=lambda one: _ORDER.index(one.state))
    if urgent:
        say(screen, "\nWhat to do:", "bold")
    for one in urgent:
        say(screen, f"  {one.state}: {one.name}: {one.advice}", _STYLES[one.state])
    if not urgent:
        say(screen, "\nNothing is to be done.")


_ORDER = ("error", "warning", "note", "ok")
_STYLES = {"error": "red", "warning": "yellow", "note": None, "ok": None}
