"""A rank's side of the debugging: writes its stacks when signalled, answers what it is asked.

    supervisor ──"debug {...}" on standard input──▶ the rank's listening thread ──▶ a file, named in the command

The listening thread needs the interpreter's lock, so a rank that is stuck with it does not answer; its stacks and
its row in the flight recorder are there all the same.
So are the last lines of its log.
"""

import faulthandler
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

import structlog

from services.executor.ipc.flight_recorder import FlightRecorder, RankRecorder
from services.executor.ipc.rank_pipe import (
    STACK_SIGNAL,
    ProfileQuestion,
    RankSpec,
    StateAnswer,
    StateQuestion,
    question_of,
    stack_file,
    write_answer,
)
from shared.messages.debugging import LeaderDump

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
                    write_answer(Path(path), StateAnswer(_thread_names(), self._leader()))
                case ProfileQuestion():
                    self._profile(question)
        except Exception:
            log.exception("debug_failed")

    def _profile(self, question: ProfileQuestion) -> None:
        from services.executor.worker.profiler import Profiler

        Profiler(self.rank, self.recorder, question).begin()


def install_stacks(path: Path) -> BinaryIO:
    """Has this process write its stacks to `path` when it is asked to. What is returned must be kept open."""
    file = path.open("ab", buffering=0)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    return file


def _thread_names() -> dict[str, str]:
    return {f"0x{thread.ident:016x}": thread.name for thread in threading.enumerate() if thread.ident}


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
