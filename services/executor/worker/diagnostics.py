"""A rank's side of the debugging: answers what it is asked, and writes its stacks when signalled.

    supervisor ──"debug {...}" on standard input──▶ the rank's listening thread ──▶ a file, named in the command

The listening thread needs the interpreter's lock, so a rank that is stuck with it does not answer: it is signalled
then, and a handler in C writes its stacks. The row in the flight recorder is there all the same, and so are the last
lines of its log.
"""

import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

import structlog

from services.executor.ipc.flight_recorder import FlightRecorder, RankRecorder
from services.executor.ipc.rank_pipe import (
    STACK_SIGNAL,
    ProfileQuestion,
    RankSpec,
    StateAnswer,
    StateQuestion,
    below,
    question_of,
    stack_file,
    write_answer,
)
from shared.messages.debugging import LeaderDump, StackDump

log = structlog.get_logger(__name__)


class RankDebug:
    def __init__(self, spec: RankSpec) -> None:
        """Stacks can be had, and the log is kept, from now on."""
        board = Path(spec.board)
        self.rank = spec.rank
        self.flight = FlightRecorder.beside(board, spec.world_size)
        self.recorder = self.flight.rank(spec.rank)
        self._stacks = install_stacks(stack_file(board.parent, spec.rank))
        self._leader: Callable[[], LeaderDump | None] = lambda: None
        sys.stderr = RecordedStream(sys.stderr, self.recorder)

    def on_state(self, leader: Callable[[], LeaderDump | None]) -> None:
        """Has `leader`, called from the listening thread, add what only the leader knows."""
        self._leader = leader

    def answer(self, line: bytes) -> None:
        """To one line of the supervisor's, which begins with `PREFIX`. Raises nothing: the rank goes on."""
        try:
            question = question_of(line)
            match question:
                case StateQuestion(path):
                    write_answer(Path(path), StateAnswer(python_stacks(), self._leader()))
                case ProfileQuestion():
                    from services.executor.worker.profiler import Profiler

                    Profiler(self.rank, self.recorder, question).begin()
        except Exception:
            log.exception("debug_failed")


def install_stacks(path: Path) -> BinaryIO:
    """Has this process write its stacks to `path` when it is asked to. What is returned must be kept open."""
    file = path.open("ab", buffering=0)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    return file


def python_stacks() -> list[StackDump]:
    """Of all threads but the one that calls, the main one last. No thread runs Python meanwhile, so that no frame goes
    away while it is read, as it can under a signal's handler."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, here = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda one: one[0] == main)  # noqa: SLF001  # no public name
    return [
        StackDump(names.get(ident) or f"0x{ident:016x}", [_place(*one) for one in traceback.walk_stack(frame)])
        for ident, frame in frames
        if ident != here
    ]


def _place(frame: FrameType, line: int) -> str:
    return f"{below(frame.f_code.co_filename, sys.path)}:{line} {frame.f_code.co_name}"


class RecordedStream:
    """A text stream that hands on what is written to it, and keeps its lines in the flight recorder."""

    def __init__(self, stream: TextIO, recorder: RankRecorder) -> None:
        self._stream = stream
        self._recorder = recorder
        self._begun = ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            if line.strip():
                self._recorder.line(line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
