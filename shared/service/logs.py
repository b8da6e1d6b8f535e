"""Structured logs: one line per event on standard error, JSON or for people, whoever has written it.

    structlog (ours) ──▶ level? ──▶ fields ──┐
    logging (libraries), warnings ─▶ level? ─┴─▶ + service, instance, group, rank, ids of request and span ─▶ stderr
    exceptions that nobody catches ──▶ as errors

The level can be changed while the process runs, for a while or for good. Of libraries there are warnings, and at
level debug what they inform of; never their own debug lines: some of those are what clients send.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import structlog
from structlog.typing import EventDict, Processor

from shared.keys import redact

LEVELS = ("debug", "info", "warning", "error")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_BESIDE_LINES = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in "\n\t"}
_OF_LINES = ("event", "exception", "stack")  # fields of which libraries and tracebacks have several lines
_NUMBERS = {name: logging.getLevelNamesMapping()[name.upper()] for name in LEVELS} | {"critical": 50}


class LevelChange(NamedTuple):
    """Another level than the settings'."""

    number: int = 0  # as in `logging`; 0: no other
    until: float = 0.0  # Unix seconds; 0: for good

    def at(self, usual: int, now: Callable[[], float]) -> int:
        """The level that holds at `now`."""
        if not self.number or (self.until and now() >= self.until):
            return usual
        return self.number


class Level(NamedTuple):
    """What is logged, by name; and until when, in unix seconds (0: for good)."""

    name: str
    usual: str
    until: float = 0.0


class _State:
    usual = logging.INFO
    change: Callable[[], LevelChange] = staticmethod(lambda: LevelChange())  # noqa: PIE807, RUF100


def threshold() -> int:
    """The number of the level that holds now."""
    change = _State.change()
    return change.at(_State.usual, time.time) if change.number else _State.usual


def level() -> Level:
    """The level that holds now."""
    change, now = _State.change(), threshold()
    until = change.until if now == change.number and now != _State.usual else 0.0
    return Level(_name(now), _name(_State.usual), until)


def set_level(name: str, seconds: float = 0.0) -> LevelChange:
    """From now on; `seconds`: for how long, 0: for good. An empty name: as the settings say."""
    number = _NUMBERS[name] if name else 0
    change = LevelChange(number, time.time() + seconds if seconds and number else 0.0)
    _State.change = staticmethod(lambda: change)
    return change


def follow(change: Callable[[], LevelChange]) -> None:
    """From now on another process decides: `change` says what it has decided."""
    _State.change = staticmethod(change)


def configure_logging(
    service: str,
    instance: str,
    *,
    level: str,
    fmt: str,
    about: Mapping[str, object] | None = None,
    whole_process: bool = True,
) -> None:
    """`about`: what every line carries beside service and instance. `whole_process`: also what libraries log and
    what nobody catches."""
    _State.usual = _NUMBERS[level]
    console = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    fields = {"service": service, "instance": instance, **(about or {})}

    def with_fields(logger: Any, name: str, event: EventDict) -> EventDict:
        return {**fields, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        with_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    # Plain: the other formatters of structlog show the values of variables, prompts among them.
    renderer: list[Processor] = (
        [_escaped, structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[_by_level, *shared, *renderer, _without_keys],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        # One write for each line: the processes of a group share a log, and lines must not meet within each other.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    if whole_process:
        _take_in(shared, renderer)
        _catch()


def adopt_loggers() -> None:
    """Takes the handlers away that libraries have given their own loggers: what they say goes our way."""
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.getLogger(name)
        if logger.handlers or not logger.propagate:
            logger.handlers, logger.propagate = [], True


def _take_in(shared: list[Processor], renderer: list[Processor]) -> None:
    """What libraries say through `logging` and `warnings`, in our form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno >= _of_libraries(threshold()))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer, _without_keys],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def _of_libraries(ours: int) -> int:
    return logging.INFO if ours <= logging.DEBUG else max(ours, logging.WARNING)


def _catch() -> None:
    """What nobody catches ends up in the log, and then where it would have ended up."""
    log = structlog.get_logger("uncaught")

    def in_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("uncaught_exception", exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            found = (args.exc_type, args.exc_value, args.exc_traceback)
            log.critical("uncaught_exception", thread=args.thread.name if args.thread else "", exc_info=found)

    def in_finalizer(args: Any) -> None:
        if args.exc_value is not None:
            found = (args.exc_type, args.exc_value, args.exc_traceback)
            log.error("unraisable_exception", about=type(args.object).__name__, exc_info=found)

    sys.excepthook = in_main
    threading.excepthook = in_thread
    sys.unraisablehook = in_finalizer


def _by_level(logger: Any, name: str, event: EventDict) -> EventDict:
    if _NUMBERS[name] < threshold():
        raise structlog.DropEvent
    return event


def _without_keys(logger: object, name: str, line: Any) -> Any:
    """No API key gets into a log, whatever a client wrote it into: a path, a model's name, an id."""
    return redact(line) if isinstance(line, str) else line


def _escaped(logger: Any, name: str, event: EventDict) -> EventDict:
    """Nothing that a client wrote moves an operator's cursor or colours its terminal. For the console renderer, which
    writes texts as they are; JSON has them escaped."""
    return {
        key: value.translate(_BESIDE_LINES if key in _OF_LINES else _CONTROLS) if isinstance(value, str) else value
        for key, value in event.items()
    }


def _name(number: int) -> str:
    return next(name for name, known in _NUMBERS.items() if known == number)
