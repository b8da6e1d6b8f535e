"""The kinds of interfaces, and their lists as they were recorded."""

from collections.abc import Callable, Iterable
from pathlib import Path

from tests.interfaces.bus import bus
from tests.interfaces.command_line import command_line
from tests.interfaces.files import files, package
from tests.interfaces.http import grpc, http
from tests.interfaces.operations import log_events, metrics, settings

KINDS: dict[str, Callable[[], Iterable[str]]] = {
    "http": http,
    "grpc": grpc,
    "command-line": command_line,
    "settings": settings,
    "metrics": metrics,
    "log-events": log_events,
    "bus": bus,
    "files": files,
    "package": package,
}
DIRECTORY = Path(__file__).parent / "recorded"


def now(kind: str) -> list[str]:
    """Sorted: the order in which things are written down is no part of an interface."""
    return sorted(set(KINDS[kind]()))


def recorded(kind: str) -> list[str]:
    """Empty where none was recorded."""
    path = DIRECTORY / f"{kind}.txt"
    return path.read_text().splitlines() if path.exists() else []


def record(kind: str) -> None:
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{kind}.txt").write_text("".join(f"{line}\n" for line in now(kind)))


def changes(kind: str) -> list[str]:
    """`-` before what has gone, `+` before what has come."""
    before, after = recorded(kind), now(kind)
    gone, come = set(before) - set(after), set(after) - set(before)
    return [*(f"- {line}" for line in before if line in gone), *(f"+ {line}" for line in after if line in come)]
