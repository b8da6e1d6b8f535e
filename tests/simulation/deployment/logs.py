"""What simulated services log: warnings and worse, or everything for a story; each line with its process.

services, structlog ──┐
nats-py, logging ─────┴─▶ level? ──▶ sink(time, process, level, event, fields)
"""

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from tests.simulation.core.processes import CURRENT

FRAMES = 4  # of an error's traceback that are told
Sink = Callable[[str, str, str, dict[str, Any]], None]  # is called with process, level, event and its fields


class _To:
    sink: Sink = staticmethod(lambda process, level, event, fields: None)


def configure(level: int = logging.WARNING) -> None:
    """Once, before services log: lines below `level` cost a call of an empty function from then on."""
    structlog.configure(
        processors=[_hand_over],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Handler(max(level, logging.WARNING))]
    root.setLevel(max(level, logging.WARNING))
    logging.raiseExceptions = False


def to(sink: Sink) -> None:
    """From now on `sink` gets the lines."""
    _To.sink = staticmethod(sink)


def _hand_over(logger: Any, name: str, event: Any) -> Any:
    said = str(event.pop("event", ""))
    if given := event.pop("exc_info", None):
        event["error"] = _told(given if isinstance(given, BaseException) else sys.exc_info()[1])
    _To.sink(CURRENT.get().name, name, said, event)
    raise structlog.DropEvent


def _told(error: BaseException | None) -> str:
    """With the innermost calls that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:] if error is not None else ()
    at = "".join(f" in {Path(frame.filename).stem}.{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return f"{error!r}{at}"


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = _told(record.exc_info[1])
        _To.sink(CURRENT.get().name, record.levelname.lower(), record.getMessage(), fields)
