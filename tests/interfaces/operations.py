"""What operators configure and watch: settings, metrics, and the events in logs."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from tests.docs import configuration
from tests.docs.pages import ROOT
from tests.interfaces.sources import nodes
from tests.monitoring.catalogue import catalogue

_LEVELS = ("info", "warning", "error", "exception", "critical")  # events at `debug` may change


def settings() -> Iterator[str]:
    """A line for each variable of the environment: its service, its type and its default."""
    with patch.dict(os.environ):
        for moved in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):  # where a user has other folders for caches and data
            os.environ.pop(moved, None)
        found = list(configuration.variables())
    yield from (f"{title}: {name}: {kind} = {default}" for title, name, kind, default in found)
    yield from (f"Beside the settings: {name}" for name in configuration.OTHERS)


def metrics() -> Iterator[str]:
    """A line for each metric: its type and its labels."""
    for service, entries in catalogue().items():
        for entry in entries:
            labels = "{" + ", ".join(entry.labels) + "}" if entry.labels else ""
            yield f"{service or 'every service'}: {entry.name}{labels}: {entry.alias_of and 'alias, '}{entry.type}"


def log_events() -> Iterator[str]:
    """A line for each event that is logged at `info` or above: where, its level, its fields."""
    found: dict[str, set[str]] = {}
    for path, node in nodes("log", "services", "shared"):
        for event, level, names in _logged(node):
            found.setdefault(f"{_service(path)}: {event}: {level}", set()).update(names)
    yield from (f"{line}: {', '.join(sorted(names))}" if names else line for line, names in found.items())


def _service(path: Path) -> str:
    first, second, *_ = path.relative_to(ROOT).parts
    return second if first == "services" else "every service"


def _logged(node: ast.AST) -> Iterator[tuple[str, str, list[str]]]:
    """The event, level and fields, where it is a call that logs; of `a if b else c` both events."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _LEVELS:
        return
    if not node.args or not ast.unparse(node.func.value).rpartition(".")[2].strip("_").startswith("log"):
        return
    for word in ast.walk(node.args[0]):
        if isinstance(word, ast.Constant) and isinstance(word.value, str):
            yield word.value, node.func.attr, [name.arg for name in node.keywords if name.arg]
