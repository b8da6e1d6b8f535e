"""A rank's side of the debugging: writes its stacks when signalled, answers what it is asked.

    orchestrator ──"debug {...}" on standard input──▶ the rank's listening thread ──▶ a file, named in the command

The listening thread needs the interpreter's lock, so a rank that is stuck with it does not answer; its stacks and
its row in the flight recorder are there all the same.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from services.executor.debug import stacks
from services.executor.debug.log_tail import RecordedStream
from services.executor.debug.recorder import FlightRecorder
from shared.messages.debugging import LeaderDump

if TYPE_CHECKING:
    from services.executor.ring import RankSpec

log = structlog.get_logger(__name__)

PREFIX = b"debug "


class StateQuestion(msgspec.Struct, frozen=True, tag="state"):
    """How are you?"""

    path: str
    """Where the answer goes, a `StateAnswer`."""


class ProfileQuestion(msgspec.Struct, frozen=True, tag="profile"):
    """Profile your next steps."""

    path: str
    """Where the answer goes, a `ProfileSummary`, once the trace is written beside it."""
    trace: str
    """Name of that file, in the same directory."""
    steps: int
    seconds: float
    memory: bool
    timeout: float
    from_step: int
    """Not before this one."""


Question = StateQuestion | ProfileQuestion


class StateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    threads: dict[str, str] = {}
    """Names of Python's threads by their number, as faulthandler writes it."""
    leader: LeaderDump | None = None


_questions = msgspec.json.Decoder(Question)


def ask(question: Question) -> bytes:
    """The line that asks it."""
    return PREFIX + msgspec.json.encode(question) + b"\n"


class RankDesk:
    """Answers for one rank."""

    def __init__(self, spec: "RankSpec") -> None:
        """Stacks can be had, and the log is kept, from now on."""
        board = Path(spec.board)
        self.rank = spec.rank
        self.flight = FlightRecorder.beside(board, spec.world_size)
        self.recorder = self.flight.rank(spec.rank)
        self._stacks = stacks.install(stack_file(board.parent, spec.rank))
        self._leader: Callable[[], LeaderDump | None] = lambda: None
        sys.stderr = RecordedStream(sys.stderr, self.recorder)

    def on_state(self, leader: Callable[[], LeaderDump | None]) -> None:
        """Has `leader`, called from the listening thread, add what only the leader knows."""
        self._leader = leader

    def answer(self, line: bytes) -> None:
        """To one line of the orchestrator's, which begins with `PREFIX`. Raises nothing: the rank goes on."""
        try:
            question = _questions.decode(line[len(PREFIX) :])
            match question:
                case StateQuestion(path):
                    write_answer(Path(path), StateAnswer(_thread_names(), self._leader()))
                case ProfileQuestion():
                    self._profile(question)
        except Exception:
            log.exception("debug_failed")

    def _profile(self, question: ProfileQuestion) -> None:
        from services.executor.debug.profiling import Profiler  # with torch, which the stub does without

        Profiler(self.rank, self.recorder, question).begin()


def stack_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return directory / f"stacks-{rank}"


def write_answer(path: Path, answer: msgspec.Struct) -> None:
    """Writes it so that whoever finds the file finds all of it."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_bytes(msgspec.json.encode(answer))
    unfinished.replace(path)


def _thread_names() -> dict[str, str]:
    return {f"0x{thread.ident:016x}": thread.name for thread in threading.enumerate() if thread.ident}
